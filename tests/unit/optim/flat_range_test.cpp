#include "optim/flat_range.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace fsdpp::optim {
namespace {

/// Elements [begin, begin + n) of two arrays that belong together.
FlatRange range_in(const at::Tensor& a, const at::Tensor& b, int64_t begin, int64_t n) {
  FlatRange range;
  range.arrays[0] = array_of(a.narrow(0, begin, n));
  range.arrays[1] = array_of(b.narrow(0, begin, n));
  range.numel = n;
  return range;
}

class FlatRanges : public ::testing::Test {
 protected:
  at::Tensor a_ = at::zeros({100});
  at::Tensor b_ = at::zeros({100}, at::kDouble);
  FlatRange at(int64_t begin, int64_t n) const { return range_in(a_, b_, begin, n); }
};

TEST_F(FlatRanges, ThatTouchBecomeOneInAnyOrder) {
  const auto runs = join_neighbours({at(50, 10), at(20, 30), at(0, 20)}, 0);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].numel, 60);
  EXPECT_EQ(runs[0].arrays[0].data, a_.data_ptr());
  EXPECT_EQ(runs[0].arrays[1].data, b_.data_ptr());
}

TEST_F(FlatRanges, WithAGapJoinOnlyWhenItIsAllowed) {
  const std::vector<FlatRange> ranges{at(0, 5), at(8, 4)};
  EXPECT_EQ(join_neighbours(ranges, 0).size(), 2U);
  EXPECT_EQ(join_neighbours(ranges, 11).size(), 2U);
  const auto joined = join_neighbours(ranges, 12);
  ASSERT_EQ(joined.size(), 1U);
  EXPECT_EQ(joined[0].numel, 12);
}

TEST_F(FlatRanges, WithAGapBetweenTwoStoragesNeverJoin) {
  FlatRange other = at(8, 4);
  other.arrays[1].storage = &other;
  EXPECT_EQ(join_neighbours({at(0, 5), other}, 100).size(), 2U);
}

TEST_F(FlatRanges, WhoseArraysMoveDifferentlyStayApart) {
  FlatRange other = at(10, 10);
  other.arrays[1] = array_of(b_.narrow(0, 11, 10));
  EXPECT_EQ(join_neighbours({at(0, 10), other}, 1000).size(), 2U);
}

TEST_F(FlatRanges, OfDifferentKindStayApart) {
  FlatRange other = at(10, 10);
  other.kind[2] = 7;
  EXPECT_EQ(join_neighbours({at(0, 10), other}, 0).size(), 2U);
}

TEST_F(FlatRanges, ThatOverlapStayApart) { EXPECT_EQ(join_neighbours({at(0, 10), at(5, 10)}, 1000).size(), 2U); }

TEST_F(FlatRanges, ThatAreEmptyVanish) {
  EXPECT_TRUE(join_neighbours({at(3, 0)}, 0).empty());
  EXPECT_EQ(join_neighbours({at(0, 10), at(10, 0), at(10, 5)}, 0).size(), 1U);
}

TEST_F(FlatRanges, PartMovesEveryArrayByItsOwnWidth) {
  const FlatRange part = part_of(at(10, 50), 7, 20);
  EXPECT_EQ(part.numel, 20);
  EXPECT_EQ(part.arrays[0].data, static_cast<char*>(a_.data_ptr()) + 17 * 4);
  EXPECT_EQ(part.arrays[1].data, static_cast<char*>(b_.data_ptr()) + 17 * 8);
  EXPECT_EQ(part.arrays[2].data, nullptr);
}

}  // namespace
}  // namespace fsdpp::optim

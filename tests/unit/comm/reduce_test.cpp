#include "comm/reduce.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdpp::comm {
namespace {

at::Tensor reduce(const std::vector<at::Tensor>& parts, ReduceOp op) {
  at::Tensor out = parts[0].clone();
  std::vector<const void*> inputs;
  for (const auto& part : parts) inputs.push_back(part.data_ptr());
  reduce_ordered(out.data_ptr(), inputs, out.numel(), out.scalar_type(), op);
  return out;
}

class SixteenBit : public testing::TestWithParam<c10::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Types, SixteenBit, testing::Values(at::kHalf, at::kBFloat16));

// LibTorch's own conversions are the reference, over more elements than one block.
TEST_P(SixteenBit, RandomSumThenFp32SumRoundedOnce) {
  // No infinities: two of opposite sign would make a NaN, which equals nothing.
  const auto make = [] { return at::randn({5001}).mul(at::randn({5001}).mul(4).exp()).clamp(-2e4, 2e4).to(GetParam()); };
  const std::vector<at::Tensor> parts = {make(), make(), make()};
  const auto want = parts[0].to(at::kFloat).add(parts[1].to(at::kFloat)).add(parts[2].to(at::kFloat)).to(GetParam());
  EXPECT_TRUE(at::equal(reduce(parts, ReduceOp::Sum), want));
}

TEST_P(SixteenBit, EveryBitPatternThenConversionIsExact) {
  std::vector<int16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<int16_t>(i);
  const auto values = at::tensor(at::ArrayRef<int16_t>(bits), at::kShort).view(GetParam());
  const auto out = reduce({values}, ReduceOp::Sum);
  for (int64_t i = 0; i < 65536; ++i) {
    const float x = values[i].item<float>(), y = out[i].item<float>();
    ASSERT_TRUE(std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y))
        << i << ": " << x << " became " << y;
  }
}

TEST_P(SixteenBit, NotANumberThenItReachesTheResult) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto a = at::tensor({1.0F, nan, 1.0F}).to(GetParam()), b = at::tensor({2.0F, 2.0F, nan}).to(GetParam());
  for (auto op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min}) {
    const auto out = reduce({a, b}, op);
    EXPECT_FALSE(std::isnan(out[0].item<float>()));
    EXPECT_TRUE(std::isnan(out[1].item<float>()));
    EXPECT_TRUE(std::isnan(out[2].item<float>()));
  }
}

TEST(ReduceOrdered, SumsOverflowThenIntegersWrap) {
  EXPECT_EQ(reduce({at::tensor({100}, at::kChar), at::tensor({100}, at::kChar)}, ReduceOp::Sum).item<int>(), 200 - 256);
  EXPECT_EQ(reduce({at::tensor({std::numeric_limits<int64_t>::max()}, at::kLong), at::tensor({int64_t{1}}, at::kLong)},
                   ReduceOp::Sum)
                .item<int64_t>(),
            std::numeric_limits<int64_t>::min());
}

TEST(ReduceOrdered, OrderGivenThenAddedInThatOrder) {
  const auto big = at::tensor({1e8F}), one = at::tensor({1.0F}), minus = at::tensor({-1e8F});
  EXPECT_EQ(reduce({big, minus, one}, ReduceOp::Sum).item<float>(), 1.0F);
  EXPECT_EQ(reduce({big, one, minus}, ReduceOp::Sum).item<float>(), 0.0F) << "the one is lost in 1e8";
}

}  // namespace
}  // namespace fsdpp::comm

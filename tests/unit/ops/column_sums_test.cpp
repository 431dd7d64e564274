// Sums of columns into a bias gradient, by the kernel and, where it does not serve, by at::sum.
#include "ops/gradients.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

at::Tensor summed(const at::Tensor& rows, const at::Tensor& before, bool accumulate) {
  auto out = before.clone();
  ops::column_sums_into(out, rows, accumulate);
  return out;
}

void expect_sums(const at::Tensor& rows, const at::Tensor& before) {
  auto sums = in_double(rows).sum(0);
  EXPECT_TRUE(is_rounded(summed(rows, before, false), sums));
  // at::sum rounds to the dtype before it adds.
  EXPECT_TRUE(is_rounded(summed(rows, before, true), sums + in_double(before), rows.is_contiguous() ? 1.01 : 20));
}

TEST(ColumnSumsInto, RoundOnceWhateverTheDtypes) {
  for (auto type : kTypes)
    for (auto out : kTypes)
      for (int64_t columns : {1, 33, 600})
        for (int64_t rows : {0, 1, 257}) expect_sums(random({rows, columns}, type, 1), random({columns}, out, 2));
}

TEST(ColumnSumsInto, TakeRowsThatAreNotDense) {
  for (auto type : kTypes) {
    auto before = random({33}, type, 2), wide = random({257, 99}, type, 1);
    expect_sums(wide.narrow(1, 33, 33), before);
    expect_sums(random({33, 257}, type, 3).t(), before);
    expect_sums(random({1, 33}, type, 4).expand({257, 33}), before);
  }
}

TEST(ColumnSumsInto, WriteAPartOfALongerGradient) {
  auto whole = at::full({12}, 5.0), part = whole.narrow(0, 4, 4), strided = whole.slice(0, 0, 12, 3);
  ops::column_sums_into(part, at::ones({3, 4}), true);
  EXPECT_TRUE(at::equal(whole, at::tensor({5.F, 5.F, 5.F, 5.F, 8.F, 8.F, 8.F, 8.F, 5.F, 5.F, 5.F, 5.F})));
  ops::column_sums_into(strided, at::ones({3, 4}), false);
  EXPECT_TRUE(at::equal(whole, at::tensor({3.F, 5.F, 5.F, 3.F, 8.F, 8.F, 3.F, 8.F, 5.F, 3.F, 5.F, 5.F})));
}

// 257 + 1: in bf16 257 is 256, and so is 256 + 1.
TEST(ColumnSumsInto, AddToANarrowGradientBeforeRounding) {
  auto rows = at::ones({258, 3}, at::kBFloat16), before = at::full({3}, 1.0, at::kBFloat16);
  rows[0].fill_(0);
  EXPECT_TRUE(at::equal(summed(rows, before, true), at::full({3}, 258.0, at::kBFloat16)));
}

}  // namespace
}  // namespace fsdpp::test

#include "kernels/column_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "unit/kernels/torch_types.h"

namespace fsdpp::kernels {
namespace {

void sum(const at::Tensor& x, DType dtype, const at::Tensor& out, DType out_dtype, bool accumulate = false) {
  ColumnSumsArgs args{.x = x.data_ptr(), .dtype = dtype, .out = out.data_ptr(), .out_dtype = out_dtype, .accumulate = accumulate};
  args.rows = x.size(0), args.columns = x.size(1);
  column_sums_cpu(args);
}

// Small integers: every order of additions gives the same sum, if it is not in 16 bits.
TEST(ColumnSums, AreExactInEveryDtypeAndShape) {
  for (const DType dtype : kAllDTypes)
    for (const DType out_dtype : kAllDTypes)
      for (const int64_t columns : {1, 7, 511, 512, 513, 2048})
        for (const int64_t rows : {1, 3, 700}) {
          const at::Tensor x = at::randint(-9, 10, {rows, columns}, torch_dtype(dtype));
          const at::Tensor exact = x.to(at::kDouble).sum(0), before = at::randint(-9, 10, {columns}, torch_dtype(out_dtype));
          const at::Tensor out = before.clone();
          sum(x, dtype, out, out_dtype, true);
          ASSERT_TRUE(at::equal(out, (exact + before).to(out.scalar_type()))) << name(dtype) << rows << " x " << columns;
          sum(x, dtype, out, out_dtype);
          ASSERT_TRUE(at::equal(out, exact.to(out.scalar_type()))) << name(dtype) << rows << " x " << columns;
        }
}

TEST(ColumnSums, OfManyRowsAreAsExactAsTheirType) {
  const at::Tensor x = at::randn({100003, 5}), wide = x.to(at::kDouble), out = at::zeros({5});
  sum(x, DType::F32, out, DType::F32);
  EXPECT_LT((out.to(at::kDouble) - wide.sum(0)).abs().max().item<double>(), 1e-4);
  const at::Tensor wide_out = at::zeros({5}, at::kDouble);
  sum(wide, DType::F64, wide_out, DType::F64);
  EXPECT_LT((wide_out - wide.sum(0)).abs().max().item<double>(), 1e-10);
}

TEST(ColumnSums, OfNoRowsAreZeroAndAddNothing) {
  const at::Tensor none = at::zeros({0, 600}), out = at::full({600}, 3.0, at::kBFloat16);
  sum(none, DType::F32, out, DType::BF16, true);
  EXPECT_TRUE(at::equal(out, at::full({600}, 3.0, at::kBFloat16)));
  sum(none, DType::F32, out, DType::BF16);
  EXPECT_TRUE(at::equal(out, at::zeros({600}, at::kBFloat16)));
}

TEST(ColumnSums, OfNoColumnsWriteNothing) {
  at::Tensor out = at::full({1}, 3.0);
  sum(at::zeros({4, 0}), DType::F32, out, DType::F32);
  EXPECT_EQ(out.item<float>(), 3.0F);
}

}  // namespace
}  // namespace fsdpp::kernels

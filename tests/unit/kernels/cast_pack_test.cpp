#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "unit/kernels/torch_types.h"

namespace fsdpp::kernels {
namespace {

TEST(Cast, BetweenAllDtypesMatchesLibTorch) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      for (const int64_t n : {0, 1, 7, 511, 512, 513, 2000}) {
        const at::Tensor src = (at::randn({n}, at::kDouble) * 100).to(torch_dtype(from));
        at::Tensor dst = at::full({n + 2}, 7, torch_dtype(to));
        cast_cpu({element(dst, 1), to, src.data_ptr(), from, n});
        EXPECT_TRUE(at::equal(dst.narrow(0, 1, n), src.to(torch_dtype(to))))
            << name(from) << " to " << name(to) << ", " << n;
        EXPECT_EQ(dst[0].item<double>(), 7);  // nothing outside the range
        EXPECT_EQ(dst[n + 1].item<double>(), 7);
      }
    }
  }
}

TEST(Cast, WithScaleAndAccumulateWorksInFloat) {
  for (const DType from : kAllDTypes) {
    for (const DType to : kAllDTypes) {
      const auto compute = from == DType::F64 || to == DType::F64 ? at::kDouble : at::kFloat;
      const at::Tensor src = at::randn({1001}, at::kDouble).to(torch_dtype(from));
      const at::Tensor old = at::randn({1001}, at::kDouble).to(torch_dtype(to));
      at::Tensor dst = old.clone();
      cast_cpu({dst.data_ptr(), to, src.data_ptr(), from, 1001, 0.3, true});
      const at::Tensor factor = at::full({1}, 0.3, compute);
      EXPECT_TRUE(at::equal(dst, (src.to(compute) * factor + old.to(compute)).to(torch_dtype(to))))
          << name(from) << " to " << name(to);
    }
  }
}

TEST(Cast, InPlaceScalesItself) {
  const at::Tensor x = at::randn({1000});
  at::Tensor y = x.clone();
  cast_cpu({y.data_ptr(), DType::F32, y.data_ptr(), DType::F32, 1000, 0.25});
  EXPECT_TRUE(at::equal(y, x * 0.25));
}

TEST(Pack, WritesEveryPieceAndNothingElse) {
  const at::Tensor a = at::randn({700});
  const at::Tensor b = at::randn({1});
  at::Tensor dst = at::full({2000}, 9, at::kBFloat16);
  const std::vector<PackPiece> pieces{
      {a.data_ptr(), 3, 700}, {nullptr, 703, 20}, {b.data_ptr(), 1999, 1}, {a.data_ptr(), 800, 0}};
  pack_cpu({dst.data_ptr(), DType::BF16, DType::F32, pieces.data(), 4, 2.0});
  at::Tensor expected = at::full({2000}, 9, at::kBFloat16);
  expected.narrow(0, 3, 700).copy_(a * 2);
  expected.narrow(0, 703, 20).zero_();
  expected.narrow(0, 1999, 1).copy_(b * 2);
  EXPECT_TRUE(at::equal(dst, expected));
}

TEST(Pack, AccumulatingLeavesZeroPiecesAlone) {
  const at::Tensor a = at::randn({5});
  at::Tensor dst = at::full({10}, 1.0, at::kFloat);
  const std::vector<PackPiece> pieces{{a.data_ptr(), 0, 5}, {nullptr, 5, 5}};
  pack_cpu({dst.data_ptr(), DType::F32, DType::F32, pieces.data(), 2, 1.0, true});
  EXPECT_TRUE(at::equal(dst, at::cat({a + 1, at::full({5}, 1.0, at::kFloat)})));
}

TEST(ScaleBy, MultipliesInPlace) {
  for (const DType dtype : kAllDTypes) {
    const at::Tensor x = at::randn({777}).to(torch_dtype(dtype));
    at::Tensor y = x.clone();
    const double coefficient = 0.125;
    scale_by_cpu(y.data_ptr(), dtype, 777, &coefficient);
    EXPECT_TRUE(at::equal(y, x * 0.125)) << name(dtype);
  }
}

}  // namespace
}  // namespace fsdpp::kernels

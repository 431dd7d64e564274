#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "unit/kernels/torch_types.h"

namespace fsdpp::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double accumulate(const at::Tensor& x, DType dtype, double p, double start = 0) {
  double result = start;
  norm_accumulate_cpu({x.data_ptr(), dtype, x.numel(), p, &result, nullptr});
  return result;
}

TEST(Norm, MatchesLibTorchInDouble) {
  for (const DType dtype : kAllDTypes) {
    for (const double p : {0.5, 1.0, 2.0, 3.0}) {
      for (const int64_t n : {0, 1, 7, 8, 513, 3001}) {
        const at::Tensor x = at::randn({n}).to(torch_dtype(dtype));
        const double expected = at::linalg_vector_norm(x.to(at::kDouble), p).item<double>();
        EXPECT_NEAR(std::pow(accumulate(x, dtype, p), 1 / p), expected, 1e-12 * (1 + expected))
            << name(dtype) << " " << p << " " << n;
      }
    }
    const at::Tensor x = at::randn({1000}).to(torch_dtype(dtype));
    EXPECT_EQ(accumulate(x, dtype, kInfinity), x.abs().max().item<double>());
  }
}

TEST(Norm, AddsToWhatIsThere) {
  const at::Tensor x = at::randn({100});
  EXPECT_DOUBLE_EQ(accumulate(x, DType::F32, 2.0, 10.0), 10.0 + accumulate(x, DType::F32, 2.0));
  EXPECT_EQ(accumulate(x, DType::F32, kInfinity, 100.0), 100.0);
}

TEST(Norm, OfLargeValuesDoesNotOverflowFloat) {
  at::Tensor x = at::randn({4});
  x.fill_(1e30);
  EXPECT_NEAR(std::sqrt(accumulate(x, DType::F32, 2.0)), 2e30, 1e24);
}

TEST(Norm, NanAndInfinityReachTheResult) {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (const int64_t where : {0, 5, 600, 999}) {
      at::Tensor x = at::randn({1000});
      x[where] = kInfinity;
      EXPECT_EQ(accumulate(x, DType::F32, p), kInfinity) << p;
      x[(where + 300) % 1000] = std::nan("");
      EXPECT_TRUE(std::isnan(accumulate(x, DType::F32, p))) << p;
      EXPECT_TRUE(std::isnan(accumulate(at::randn({10}), DType::F32, p, std::nan("")))) << p;
    }
  }
}

}  // namespace
}  // namespace fsdpp::kernels

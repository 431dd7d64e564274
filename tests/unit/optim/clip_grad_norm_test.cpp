#include "fsdpp/optim/clip_grad_norm.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/randn_like.h>

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

#include "fsdpp/base/error.h"
#include "unit/optim/models.h"

namespace fsdpp::optim {
namespace {

using test::bag;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(ClipGradNorm, OnAPlainModuleMatchesLibTorch) {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.1, 1e6}) {
      const auto ours = bag({{"w", at::ones({33, 7})}, {"b", at::ones({5}, at::kDouble)}, {"none", at::ones({3})}});
      const auto theirs = bag({{"w", at::ones({33, 7})}, {"b", at::ones({5}, at::kDouble)}, {"none", at::ones({3})}});
      for (const char* name : {"w", "b"}) {
        (*ours)[name].mutable_grad() = at::randn_like((*ours)[name]).detach();
        (*theirs)[name].mutable_grad() = (*ours)[name].grad().clone();
      }
      const double expected = torch::nn::utils::clip_grad_norm_(theirs->parameters(), max_norm, p);
      EXPECT_NEAR(clip_grad_norm_(*ours, max_norm, p), expected, 1e-5 * expected);
      for (const char* name : {"w", "b"})
        EXPECT_TRUE(at::allclose((*ours)[name].grad(), (*theirs)[name].grad(), 1e-5, 1e-9)) << p;
    }
  }
}

TEST(ClipGradNorm, OfDoublesIsExactToDoublePrecision) {
  const auto model = bag({{"w", at::ones({4}, at::kDouble)}});
  (*model)["w"].mutable_grad() = at::ones({4}, at::kDouble) * 3;
  EXPECT_EQ(clip_grad_norm_(*model, 1.5), 6.0);
  EXPECT_NEAR((*model)["w"].grad()[0].item<double>(), 3 * 1.5 / (6 + 1e-6), 1e-15);
}

TEST(ClipGradNorm, WithoutGradientsThenZero) {
  const auto model = bag({{"w", at::ones({4})}});
  EXPECT_EQ(grad_norm(*model), 0.0);
  EXPECT_EQ(clip_grad_norm_(*model, 1.0), 0.0);
  EXPECT_EQ(clip_grad_norm_(*bag({}), 1.0, kInfinity), 0.0);
}

TEST(ClipGradNorm, OfStridedGradientsScalesInPlace) {
  const auto model = bag({{"w", at::ones({4})}});
  const at::Tensor wide = at::ones({8});
  (*model)["w"].mutable_grad() = wide.slice(0, 0, 8, 2);
  EXPECT_NEAR(clip_grad_norm_(*model, 1.0), 2.0, 1e-12);
  EXPECT_NEAR(wide[2].item<double>(), 0.5, 1e-6);
  EXPECT_EQ(wide[1].item<double>(), 1.0);
}

TEST(ClipGradNorm, WithABadOrderThenConfigError) {
  const auto model = bag({{"w", at::ones({4})}});
  for (const double p : {0.0, -1.0, std::nan("")}) EXPECT_THROW((void)grad_norm(*model, p), ConfigError);
}

TEST(ClipGradNorm, WithIntegerGradientsThenUsageError) {
  const auto model = bag({{"n", at::ones({3}, at::kLong)}});
  (*model)["n"].mutable_grad() = at::ones({3}, at::kLong);
  EXPECT_THROW((void)grad_norm(*model), UsageError);
}

}  // namespace
}  // namespace fsdpp::optim

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "unit/kernels/torch_types.h"

namespace fsdpp::kernels {
namespace {

struct State {
  at::Tensor m, v;
};

AdamWArgs args_for(const at::Tensor& param, const at::Tensor& grad, const State& state, DType dtype, int64_t step) {
  AdamWArgs args;
  args.param = param.data_ptr();
  args.param_dtype = dtype;
  args.grad = grad.data_ptr();
  args.grad_dtype = dtype;
  args.exp_avg = state.m.data_ptr();
  args.exp_avg_sq = state.v.data_ptr();
  args.numel = param.numel();
  args.step = step;
  return args;
}

/// Relative to the value, or to the size of one update where that is larger.
double largest_relative_error(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs() / b.abs().clamp_min(1e-2)).max().item<double>();
}

/// Ten steps beside torch::optim::AdamW on the same gradients.
void expect_like_torch(DType dtype, double lr, double decay, double tolerance) {
  at::Tensor theirs = at::randn({1537}, torch_dtype(dtype));
  at::Tensor ours = theirs.clone();
  theirs.set_requires_grad(true);
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(lr).weight_decay(decay).betas({0.8, 0.95}));
  const State state{at::zeros_like(ours), at::zeros_like(ours)};
  for (int64_t step = 1; step <= 10; ++step) {
    theirs.mutable_grad() = at::randn_like(ours) * 3;
    AdamWArgs args = args_for(ours, theirs.grad(), state, dtype, step);
    args.lr = lr;
    args.weight_decay = decay;
    args.beta1 = 0.8;
    args.beta2 = 0.95;
    adamw_cpu(args);
    reference.step();
    EXPECT_LT(largest_relative_error(ours, theirs.detach()), tolerance) << "step " << step;
  }
}

TEST(AdamW, TenStepsMatchLibTorchInFloat) { expect_like_torch(DType::F32, 1e-2, 0.1, 1e-6); }
TEST(AdamW, TenStepsMatchLibTorchInDouble) { expect_like_torch(DType::F64, 1e-2, 0.1, 1e-14); }
TEST(AdamW, WithoutDecayMatchesLibTorch) { expect_like_torch(DType::F32, 1e-3, 0.0, 1e-6); }

TEST(AdamW, OneStepByHand) {
  at::Tensor p = at::full({1}, 2.0, at::kDouble);
  const at::Tensor g = at::full({1}, 4.0, at::kDouble);
  const State state{at::zeros({1}, at::kDouble), at::zeros({1}, at::kDouble)};
  AdamWArgs args = args_for(p, g, state, DType::F64, 1);
  args.lr = 0.5;
  args.weight_decay = 0.1;
  args.eps = 0;
  args.grad_scale = 0.5;
  adamw_cpu(args);
  EXPECT_NEAR(p.item<double>(), 2.0 * 0.95 - 0.5, 1e-12);  // first step: m / sqrt(v) is the sign of g
  EXPECT_NEAR(state.m.item<double>(), 0.1 * 2, 1e-15);
  EXPECT_NEAR(state.v.item<double>(), 0.001 * 4, 1e-15);
}

TEST(AdamW, WithTheLargestSecondMomentMatchesLibTorchsAmsgrad) {
  at::Tensor theirs = at::randn({1537});
  at::Tensor ours = theirs.clone();
  theirs.set_requires_grad(true);
  torch::optim::AdamW reference({theirs}, torch::optim::AdamWOptions(1e-2).betas({0.5, 0.5}).amsgrad(true));
  const State state{at::zeros_like(ours), at::zeros_like(ours)};
  const at::Tensor largest = at::zeros_like(ours);
  bool differs = false;
  for (int64_t step = 1; step <= 6; ++step) {
    theirs.mutable_grad() = at::randn_like(ours) * (7 - step);
    AdamWArgs args = args_for(ours, theirs.grad(), state, DType::F32, step);
    args.lr = 1e-2;
    args.beta1 = args.beta2 = 0.5;
    args.max_exp_avg_sq = largest.data_ptr();
    adamw_cpu(args);
    reference.step();
    EXPECT_LT(largest_relative_error(ours, theirs.detach()), 1e-6) << "step " << step;
    differs = differs || !at::equal(largest, state.v);
  }
  EXPECT_TRUE(differs);
}

TEST(AdamW, ANegativeScaleClimbs) {
  const at::Tensor g = at::randn({600});
  at::Tensor p = at::randn({600});
  at::Tensor q = p.clone();
  const State a{at::zeros({600}), at::zeros({600})};
  const State b{at::zeros({600}), at::zeros({600})};
  AdamWArgs climbs = args_for(p, g, a, DType::F32, 1);
  climbs.grad_scale = -0.5;
  adamw_cpu(climbs);
  const at::Tensor negative = g * -0.5;
  adamw_cpu(args_for(q, negative, b, DType::F32, 1));
  EXPECT_TRUE(at::equal(p, q));
}

TEST(AdamW, ZerosStayZeros) {
  at::Tensor p = at::zeros({100});
  const State state{at::zeros({100}), at::zeros({100})};
  for (int64_t step = 1; step <= 3; ++step) adamw_cpu(args_for(p, at::zeros({100}), state, DType::F32, step));
  EXPECT_TRUE(at::equal(p, at::zeros({100})));
}

}  // namespace
}  // namespace fsdpp::kernels

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "unit/kernels/torch_types.h"

namespace fsdpp::kernels {
namespace {

SGDArgs args_for(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& buffer, DType dtype) {
  SGDArgs args;
  args.param = param.data_ptr();
  args.param_dtype = dtype;
  args.grad = grad.data_ptr();
  args.grad_dtype = dtype;
  args.momentum_buffer = buffer.defined() ? buffer.data_ptr() : nullptr;
  args.numel = param.numel();
  return args;
}

struct Case {
  double momentum, dampening, decay;
  bool nesterov;
};

/// Six steps beside torch::optim::SGD on the same gradients.
void expect_like_torch(DType dtype, const Case& c, double tolerance) {
  at::Tensor theirs = at::randn({1537}, torch_dtype(dtype));
  at::Tensor ours = theirs.clone();
  theirs.set_requires_grad(true);
  torch::optim::SGD reference({theirs}, torch::optim::SGDOptions(0.1)
                                            .momentum(c.momentum)
                                            .dampening(c.dampening)
                                            .weight_decay(c.decay)
                                            .nesterov(c.nesterov));
  const at::Tensor buffer =
      c.momentum > 0 ? at::full({1537}, std::numeric_limits<double>::quiet_NaN(), ours.options()) : at::Tensor();
  for (int step = 0; step < 6; ++step) {
    theirs.mutable_grad() = at::randn_like(ours);
    SGDArgs args = args_for(ours, theirs.grad(), buffer, dtype);
    args.lr = 0.1;
    args.momentum = c.momentum;
    args.dampening = c.dampening;
    args.weight_decay = c.decay;
    args.nesterov = c.nesterov;
    args.first = step == 0;
    sgd_cpu(args);
    reference.step();
    EXPECT_LT((ours - theirs.detach()).abs().max().item<double>(), tolerance)
        << "step " << step << " momentum " << c.momentum << " dampening " << c.dampening << " decay " << c.decay;
  }
}

TEST(SGD, SixStepsMatchLibTorch) {
  for (const Case& c : {Case{0, 0, 0, false}, Case{0, 0, 0.1, false}, Case{0.9, 0, 0, false},
                        Case{0.9, 0.3, 0.1, false}, Case{0.9, 0, 0.1, true}}) {
    expect_like_torch(DType::F32, c, 2e-6);
    expect_like_torch(DType::F64, c, 1e-14);
  }
}

TEST(SGD, TwoStepsByHand) {
  at::Tensor p = at::full({1}, 2.0, at::kDouble);
  const at::Tensor g = at::full({1}, 4.0, at::kDouble);
  const at::Tensor buffer = at::zeros({1}, at::kDouble);
  SGDArgs args = args_for(p, g, buffer, DType::F64);
  args.lr = 0.5;
  args.momentum = 0.5;
  args.dampening = 0.25;
  args.weight_decay = 0.5;
  args.grad_scale = 0.25;
  args.first = true;
  sgd_cpu(args);
  EXPECT_EQ(buffer.item<double>(), 2.0);  // 4/4 + 2/2: no dampening at first
  EXPECT_EQ(p.item<double>(), 1.0);
  args.first = false;
  sgd_cpu(args);
  EXPECT_EQ(buffer.item<double>(), 0.5 * 2.0 + 0.75 * 1.5);
  EXPECT_EQ(p.item<double>(), 1.0 - 0.5 * 2.125);
}

TEST(SGD, WithoutDecayAnInfiniteParameterIsNotMultiplied) {
  at::Tensor p = at::full({3}, std::numeric_limits<double>::infinity(), at::kFloat);
  sgd_cpu(args_for(p, at::zeros({3}), at::Tensor(), DType::F32));
  EXPECT_EQ(p[1].item<double>(), std::numeric_limits<double>::infinity());
}

TEST(SGD, OfHalvesKeepsTheMomentumInFloat) {
  at::Tensor p = at::full({600}, 1.0, at::kBFloat16);
  const at::Tensor g = at::full({600}, 1.0, at::kBFloat16);
  const at::Tensor buffer = at::zeros({600});
  SGDArgs args = args_for(p, g, buffer, DType::BF16);
  args.lr = 0.25;
  args.momentum = 0.001;
  args.first = true;
  sgd_cpu(args);
  args.first = false;
  sgd_cpu(args);
  EXPECT_TRUE(at::equal(buffer, at::full({600}, 1.0F + 0.001F)));
  EXPECT_TRUE(at::equal(p, at::full({600}, 0.5, at::kBFloat16)));
}

}  // namespace
}  // namespace fsdpp::kernels

#include "fsdpp/optim/sgd.h"

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "fsdpp/base/error.h"
#include "unit/optim/models.h"

namespace fsdpp::optim {
namespace {

using test::bag;

torch::optim::SGDOptions libtorch(const SGDOptions& o) {
  return torch::optim::SGDOptions(o.lr)
      .momentum(o.momentum)
      .dampening(o.dampening)
      .weight_decay(o.weight_decay)
      .nesterov(o.nesterov);
}

TEST(SGD, OnAPlainModuleMatchesLibTorchOverFiveSteps) {
  for (const SGDOptions& options :
       {SGDOptions{.lr = 0.1}, SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1},
        SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}}) {
    const auto ours = bag({{"w", at::randn({33, 7})}, {"s", at::randn({})}, {"d", at::randn({5}, at::kDouble)}});
    const auto theirs = bag({{"w", (*ours)["w"]}, {"s", (*ours)["s"]}, {"d", (*ours)["d"]}});
    SGD optimizer(*ours, options);
    torch::optim::SGD reference(theirs->parameters(), libtorch(options));
    for (int step = 0; step < 5; ++step) {
      for (const char* name : {"w", "s", "d"}) {
        if (step == 0 && name == std::string("s")) continue;  // its buffer begins a step later
        const at::Tensor grad = at::randn((*ours)[name].sizes(), (*ours)[name].options().requires_grad(false));
        (*ours)[name].mutable_grad() = grad.clone();
        (*theirs)[name].mutable_grad() = grad.clone();
      }
      optimizer.step();
      reference.step();
      for (const char* name : {"w", "s", "d"}) {
        EXPECT_LT(((*ours)[name] - (*theirs)[name]).abs().max().item<double>(), 2e-6) << name << " step " << step;
      }
    }
  }
}

TEST(SGD, MaximizeClimbsByTheGradientAndStillDecays) {
  const auto model = bag({{"w", at::ones({2})}});
  SGD optimizer(*model, {.lr = 0.5, .weight_decay = 0.5, .maximize = true});
  (*model)["w"].mutable_grad() = at::ones({2});
  optimizer.step();
  EXPECT_EQ((*model)["w"][1].item<double>(), 1.0 - 0.5 * (-1.0 + 0.5));
}

TEST(SGD, WithoutMomentumKeepsNoState) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  SGD optimizer({{{(*model)["a"]}, {.lr = 0.5}}, {{(*model)["b"]}, {.lr = 0.5, .momentum = 0.5}}});
  for (const char* name : {"a", "b"}) (*model)[name].mutable_grad() = at::ones({4});
  EXPECT_FALSE(optimizer.momentum_buffer((*model)["b"]).defined());
  optimizer.step();
  EXPECT_FALSE(optimizer.momentum_buffer((*model)["a"]).defined());
  EXPECT_TRUE(at::equal(optimizer.momentum_buffer((*model)["b"]), at::ones({4})));
  EXPECT_EQ(optimizer.state_bytes(), 4 * 4);
  EXPECT_TRUE(at::equal((*model)["a"].detach(), (*model)["b"].detach()));
  optimizer.step();
  EXPECT_EQ((*model)["a"][0].item<double>(), 0.0);
  EXPECT_EQ((*model)["b"][0].item<double>(), 0.5 - 0.5 * 1.5);
}

TEST(SGD, WithBadOptionsThenConfigError) {
  const auto model = bag({{"w", at::ones({3})}});
  EXPECT_THROW(SGD(*model, {.lr = -1}), ConfigError);
  EXPECT_THROW(SGD(*model, {.momentum = -0.5}), ConfigError);
  EXPECT_THROW(SGD(*model, {.weight_decay = -0.5}), ConfigError);
  EXPECT_THROW(SGD(*model, {.nesterov = true}), ConfigError);
  EXPECT_THROW(SGD(*model, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), ConfigError);
  EXPECT_THROW((void)SGD(*model).momentum_buffer(at::ones({3})), UsageError);
}

}  // namespace
}  // namespace fsdpp::optim

#include "fsdpp/optim/grad_scaler.h"

#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/world.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "fsdpp/optim/sgd.h"
#include "support/event_log.h"
#include "unit/optim/models.h"

namespace fsdpp::optim {
namespace {

using test::bag;
using test::Bag;
constexpr float kInf = std::numeric_limits<float>::infinity();

/// One plain parameter w [3] = 1 with this gradient, scaled.
std::shared_ptr<Bag> model_with_grad(const GradScaler& scaler, float grad) {
  const auto model = bag({{"w", at::ones({3})}});
  (*model)["w"].mutable_grad() = at::full({3}, grad * scaler.scale());
  return model;
}

TEST(GradScaler, ScalesTheLossInsideTheGraph) {
  GradScaler scaler({.init_scale = 8});
  const at::Tensor x = at::ones({2}).set_requires_grad(true);
  scaler.scale(x.sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 8.0)));
  const at::Tensor half = GradScaler().scale(at::scalar_tensor(2.0, at::kHalf));  // 131072: too large for fp16
  EXPECT_EQ(half.scalar_type(), at::kFloat);
  EXPECT_EQ(half.item<double>(), 131072);
}

TEST(GradScaler, StepUnscalesAndUpdates) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536);
  const auto model = model_with_grad(scaler, 2);
  SGD optimizer(*model, {.lr = 0.25});
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_TRUE(at::equal((*model)["w"].detach(), at::full({3}, 0.5)));
  EXPECT_EQ(scaler.state().growth_tracker, 1);
}

TEST(GradScaler, AfterUnscaleTheGradientsAreNotUnscaledAgain) {
  GradScaler scaler({.init_scale = 16});
  const auto model = model_with_grad(scaler, 2);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.25));
  scaler.unscale_(*model);
  EXPECT_TRUE(at::equal((*model)["w"].grad(), at::full({3}, 2.0)));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(at::equal((*model)["w"].detach(), at::full({3}, 0.5)));
}

TEST(GradScaler, SkipsNonFiniteStepsBacksOffAndGrowsAgain) {
  GradScaler scaler({.init_scale = 64, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 2});
  const auto run = [&](float grad) {
    const auto model = model_with_grad(scaler, grad);
    AdamW optimizer(*model);
    const bool stepped = scaler.step(optimizer);
    EXPECT_EQ(stepped, !at::equal((*model)["w"].detach(), at::ones({3})));
    scaler.update();
    return stepped;
  };
  EXPECT_TRUE(run(1));
  EXPECT_FALSE(run(kInf));
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_EQ(scaler.state().growth_tracker, 0);
  EXPECT_FALSE(run(std::nanf("")));
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_TRUE(run(1));
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_TRUE(run(1));
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_EQ(scaler.state().growth_tracker, 0);
}

TEST(GradScaler, DoesNotGrowBeyondFloat) {
  GradScaler scaler({.init_scale = 2e38, .growth_interval = 1});
  const auto model = bag({{"w", at::ones({3})}});
  SGD optimizer(*model);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.scale(), static_cast<double>(2e38F));
}

TEST(GradScaler, TwoOptimizersSkipEachForItself) {
  GradScaler scaler({.init_scale = 4});
  const auto good = model_with_grad(scaler, 1);
  const auto bad = model_with_grad(scaler, kInf);
  SGD of_good(*good);
  SGD of_bad(*bad);
  EXPECT_TRUE(scaler.step(of_good));
  EXPECT_FALSE(scaler.step(of_bad));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 2);
}

TEST(GradScaler, CalledOutOfOrderThenUsageErrorAndGradientsStay) {
  GradScaler scaler({.init_scale = 4});
  EXPECT_THROW(scaler.update(), UsageError);
  const auto model = model_with_grad(scaler, 1);
  SGD optimizer(*model);
  scaler.unscale_(optimizer);
  EXPECT_THROW(scaler.unscale_(*model), UsageError);
  scaler.step(optimizer);
  EXPECT_THROW(scaler.step(optimizer), UsageError);
  EXPECT_THROW(scaler.unscale_(optimizer), UsageError);
  EXPECT_TRUE(at::equal((*model)["w"].grad(), at::ones({3})));
  scaler.update();
  EXPECT_NO_THROW(scaler.unscale_(optimizer));
}

TEST(GradScaler, OfHalfGradientsThenUsageErrorAndNothingIsChanged) {
  GradScaler scaler({.init_scale = 4});
  const auto model = bag({{"a", at::ones({3})}, {"w", at::ones({3}, at::kHalf)}});
  (*model)["a"].mutable_grad() = at::ones({3});
  (*model)["w"].mutable_grad() = at::ones({3}, at::kHalf);
  EXPECT_THROW(scaler.unscale_(*model), UsageError);
  EXPECT_TRUE(at::equal((*model)["a"].grad(), at::ones({3})));
}

TEST(GradScaler, DisabledPassesEverythingThrough) {
  GradScaler scaler({.enabled = false});
  const auto model = model_with_grad(scaler, kInf);
  SGD optimizer(*model);
  EXPECT_EQ(scaler.scale(at::ones({})).item<double>(), 1);
  scaler.unscale_(*model);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_NO_THROW(scaler.update());
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ((*model)["w"][0].item<float>(), -kInf);
}

TEST(GradScaler, StateGoesOverAndNonsenseIsRefused) {
  GradScaler a({.init_scale = 4, .growth_interval = 3});
  a.set_state({.scale = 32, .growth_tracker = 2});
  const auto model = model_with_grad(a, 1);
  SGD optimizer(*model);
  a.step(optimizer);
  a.update();
  EXPECT_EQ(a.scale(), 64);
  a.update(8);
  EXPECT_EQ(a.state().scale, 8);
  EXPECT_THROW(a.update(0), ConfigError);
  EXPECT_THROW(a.set_state({.scale = 1e300}), ConfigError);
  EXPECT_THROW(a.set_state({.scale = 1, .growth_tracker = -1}), ConfigError);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), ConfigError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), ConfigError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), ConfigError);
}

/// a on four shards, b on two replicas of two shards, each with something on every rank; u unsharded.
struct MixedModel {
  std::shared_ptr<Bag> a = bag({{"a", at::ones({128})}});
  std::shared_ptr<Bag> b = bag({{"b", at::ones({128})}});
  std::shared_ptr<Bag> model = bag({{"u", at::ones({2})}});
  explicit MixedModel(const std::shared_ptr<comm::World>& world) {
    fully_shard(a, comm::Mesh::shard(world, "flat"));
    fully_shard(b, comm::Mesh::hybrid(world, 2, "grid"));
    model->register_module("a", a);
    model->register_module("b", b);
    for (const at::Tensor& p : model->parameters()) p.mutable_grad() = at::ones(p.sizes());
  }
  [[nodiscard]] std::vector<at::Tensor> params() const { return {(*a)["a"], (*b)["b"], (*model)["u"]}; }
};

TEST(ShardedGradScaler, WhateverOneRankFindsAllRanksSkip) {
  for (int bad_rank = 0; bad_rank < 4; ++bad_rank) {
    for (size_t bad_param = 0; bad_param < 3; ++bad_param) {
      comm::run_local_world(4, [&](std::shared_ptr<comm::World> world) {
        const MixedModel m(world);
        if (world->rank() == bad_rank) m.params()[bad_param].mutable_grad()[0] = kInf;
        EXPECT_FALSE(grads_are_finite(*m.model));
        GradScaler scaler({.init_scale = 2});
        SGD optimizer(*m.model, {.lr = 1});
        EXPECT_FALSE(scaler.step(optimizer)) << bad_rank << bad_param;
        scaler.update();
        EXPECT_EQ(scaler.scale(), 1);
        for (const at::Tensor& p : m.params()) EXPECT_TRUE(at::equal(p.detach(), at::ones(p.sizes())));
      });
    }
  }
}

TEST(ShardedGradScaler, OnAGridReplicasSkipTogetherToo) {
  for (int bad_rank = 0; bad_rank < 4; ++bad_rank) {
    comm::run_local_world(4, [&](std::shared_ptr<comm::World> world) {
      const auto model = bag({{"w", at::ones({128})}});
      fully_shard(model, comm::Mesh::hybrid(world, 2));
      const at::Tensor w = (*model)["w"];
      w.mutable_grad() = at::ones(w.sizes());
      if (world->rank() == bad_rank) w.mutable_grad()[0] = kInf;
      EXPECT_FALSE(grads_are_finite(*model)) << bad_rank;
    });
  }
}

TEST(ShardedGradScaler, AsksEachAxisOfEachMeshOnce) {
  comm::run_local_world(4, [&](std::shared_ptr<comm::World> world) {
    const MixedModel m(world);
    GradScaler scaler({.init_scale = 2});
    SGD optimizer(*m.model, {.lr = 1});
    fsdpp::test::EventLog log(fsdpp::test::EventLog::What::Collectives);
    scaler.unscale_(*m.model);
    EXPECT_EQ(log.take(), std::vector<std::string>(3, "all_reduce grads_are_finite"));
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(log.take().empty());
    for (const at::Tensor& p : m.params()) EXPECT_TRUE(at::equal(p.detach(), at::full(p.sizes(), 0.5)));
  });
}

class HalfBlockImpl : public torch::nn::Module {
 public:
  HalfBlockImpl() { weight = register_parameter("weight", at::ones({6, 4})); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
FSDPP_MODULE(HalfBlock);

/// Gradients of the loss are 2 · scale in fp16 on the way: finite up to a scale of 2^14 (65504 / 2 = 32752).
TEST(ShardedGradScaler, InHalfPrecisionBacksOffUntilTheGradientsFit) {
  comm::run_local_world(2, [&](std::shared_ptr<comm::World> world) {
    HalfBlock block;
    fully_shard(block, comm::Mesh::shard(world), {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
    SGD optimizer(*block, {.lr = 0.25});
    GradScaler scaler;
    std::vector<bool> stepped;
    for (int k = 0; k < 4; ++k) {
      // Only rank 1's loss is large enough to overflow.
      const at::Tensor y = block(at::ones({1, 4}));
      scaler.scale(y.to(at::kFloat).sum() * (world->rank() == 1 ? 2.0 : 0.0)).backward();
      stepped.push_back(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
    }
    EXPECT_EQ(stepped, (std::vector<bool>{false, false, true, true}));
    EXPECT_EQ(scaler.scale(), 16384);
    EXPECT_TRUE(at::equal(full_tensor(block->weight), at::full({6, 4}, 1.0 - 2 * 0.25)));
  });
}

}  // namespace
}  // namespace fsdpp::optim

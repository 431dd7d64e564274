// The optimizer's update inside backward, and the shard that is kept in the gathered dtype.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/registry.h"
#include "engine/unit.h"
#include "fsdpp/api/unit_handle.h"
#include "fsdpp/base/error.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "fsdpp/optim/grad_scaler.h"
#include "fsdpp/optim/sgd.h"
#include "support/event_log.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using ::testing::HasSubstr;

FullyShardOptions with_casts(bool keep, c10::ScalarType reduce = at::kFloat) {
  FullyShardOptions options;
  options.mp_policy.param_dtype = at::kBFloat16;
  options.mp_policy.reduce_dtype = reduce;
  options.keep_cast_shard = keep;
  return options;
}

struct How {
  bool in_backward = false;
  bool keep_cast = false;
  bool casts = false;
  c10::ScalarType reduce = at::kFloat;
  int replicas = 1;
  int micro_batches = 1;
  int steps = 4;
};

/// The full parameters after some steps of AdamW.
std::vector<at::Tensor> trained(const std::shared_ptr<World>& world, const How& how) {
  auto net = make_tiny_net();
  auto options = how.casts ? with_casts(how.keep_cast, how.reduce) : FullyShardOptions{};
  auto mesh = how.replicas > 1 ? Mesh::hybrid(world, how.replicas) : Mesh::shard(world);
  shard_tiny_net(net, mesh, options, options);
  optim::AdamW adam(*net, {.lr = 0.01, .eps = 1e-3});
  if (how.in_backward) adam.step_in_backward(*net);
  for (int step = 0; step < how.steps; ++step) {
    for (int micro = 0; micro < how.micro_batches; ++micro) {
      unit_of(*net).set_requires_gradient_sync(micro + 1 == how.micro_batches);
      auto ids = tokens(10 * step + 100 * micro + world->rank());
      token_loss(net(ids), ids).backward();
    }
    for (auto& p : net->parameters()) EXPECT_EQ(p.grad().defined(), !how.in_backward);
    adam.step();
    adam.zero_grad();
  }
  std::vector<at::Tensor> result;
  for (auto& p : net->parameters()) {
    EXPECT_EQ(adam.state(p).step, how.steps);
    result.push_back(full_tensor(p));
  }
  return result;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << "parameter " << i;
}

class StepInBackward : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StepInBackward, ::testing::Values(1, 2, 3));

TEST_P(StepInBackward, GivesTheBitsOfAStepAfterIt) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    for (auto [casts, reduce] :
         {std::pair(false, at::kFloat), std::pair(true, at::kFloat), std::pair(true, at::kBFloat16)})
      for (int micro_batches : {1, 3}) {
        How how{.casts = casts, .reduce = reduce, .micro_batches = micro_batches};
        auto want = trained(world, how);
        how.in_backward = true;
        expect_equal(trained(world, how), want);
        how.steps = 3;
        EXPECT_FALSE(at::equal(trained(world, how)[0], want[0])) << "the comparison tells steps apart";
      }
  });
}

TEST(StepInBackwardOnReplicas, GivesTheBitsOfAStepAfterIt) {
  run_local_world(4, [](std::shared_ptr<World> world) {
    How how{.casts = true, .replicas = 2};
    auto want = trained(world, how);
    how.in_backward = how.keep_cast = true;
    expect_equal(trained(world, how), want);
  });
}

TEST(StepInBackward, ComesUnitByUnit) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    optim::AdamW adam(*net);
    adam.step_in_backward(*net);
    auto ids = tokens(1);
    auto loss = token_loss(net(ids), ids);
    EventLog log(EventLog::What::Hooks);
    loss.backward();
    int updates = 0;
    for (auto& e : log.take()) updates += e.starts_with("+Optimizer") ? 1 : 0;
    EXPECT_EQ(updates, static_cast<int>(units(*net).size()));
  });
}

TEST(StepInBackward, LeavesTheMemoryFormulaTwoGradientsOfEachSize) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net(1, 5);
    shard_tiny_net(net, Mesh::shard(world));
    const auto before = memory_formula(*net);
    optim::AdamW adam(*net);
    adam.step_in_backward(*net);
    const auto after = memory_formula(*net);
    const auto block = unit_of(*net->blocks[0]).memory().sharded_gradient_bytes;
    EXPECT_EQ(before.sharded_gradients - after.sharded_gradients, 3 * block);
  });
}

TEST(StepInBackward, RefusesWhatNeedsAllGradients) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    auto message = [&](auto f) {
      try {
        f();
      } catch (const UsageError& e) {
        return std::string(e.what());
      }
      return std::string();
    };
    {
      optim::AdamW adam(*net);
      adam.step_in_backward(*net);
      EXPECT_THAT(message([&] { (void)optim::grad_norm(*net); }), HasSubstr("without step_in_backward"));
      EXPECT_THAT(message([&] { (void)optim::clip_grad_norm_(*net, 1.0); }), HasSubstr("clip_grad_norm_"));
      optim::GradScaler scaler;
      EXPECT_THAT(message([&] { scaler.unscale_(adam); }), HasSubstr("GradScaler"));
    }
    EXPECT_EQ(optim::grad_norm(*net), 0) << "ends with the optimizer";
    optim::AdamW adam(*net);
    auto plain = make_tiny_net();
    EXPECT_THAT(message([&] { adam.step_in_backward(*plain); }), HasSubstr("fully_shard first"));
  });
}

TEST(StepInBackward, OfAnotherOptimizerTakesOver) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    optim::AdamW adam(*net);
    optim::SGD sgd(*net, {.lr = 0.1});
    adam.step_in_backward(*net);
    sgd.step_in_backward(*net);
    auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
    for (auto& p : net->parameters()) EXPECT_EQ(adam.state(p).step, 0);
  });
}

/// Sees what an optimizer is given, and drops it or leaves it.
struct Onlooker final : engine::BackwardStepper {
  bool drops = true;
  std::vector<at::Tensor> given;
  [[nodiscard]] bool active() const noexcept override { return true; }
  void step_some(const std::vector<at::Tensor>& parameters) override {
    for (auto& p : parameters) {
      given.push_back(p.grad().clone());
      if (drops) p.mutable_grad() = at::Tensor();
    }
  }
};

/// A linear layer whose weight's gradient is written by a product: in fp32 where it may.
struct OneProduct {
  torch::nn::Linear layer{torch::nn::LinearOptions(33, 17).bias(false)};
  std::shared_ptr<Onlooker> onlooker = std::make_shared<Onlooker>();
  at::Tensor x;
  OneProduct(const std::shared_ptr<World>& world, c10::ScalarType reduce, bool steps = true) {
    fill_parameters(*layer, 3);
    x = at::randn({19, 33}, at::detail::createCPUGenerator(5)).to(at::kBFloat16);
    fully_shard(layer, Mesh::shard(world), with_casts(false, reduce));
    if (!steps) return;
    for (auto& unit : engine::find_units(*layer)) unit->step_by(onlooker);
  }
  void backward() {
    auto unit = unit_of(*layer);
    unit.unshard();
    ops::linear(x, layer->weight).to(at::kFloat).square().sum().backward();
  }
};

TEST(GradientsDroppedInBackward, KeepTheReduceDtypeOnOneRank) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    OneProduct wide(world, at::kFloat), narrow(world, at::kBFloat16), seen(world, at::kBFloat16, /*steps=*/false);
    for (auto* one : {&wide, &narrow, &seen}) one->backward();
    ASSERT_EQ(narrow.onlooker->given.size(), 1U);
    const auto &exact = wide.onlooker->given.at(0), &rounded = narrow.onlooker->given.at(0);
    EXPECT_EQ(exact.scalar_type(), at::kFloat);
    ASSERT_EQ(rounded.scalar_type(), at::kBFloat16);
    EXPECT_FALSE(at::equal(exact, rounded.to(at::kFloat))) << "the product's bits beyond bf16";
    EXPECT_TRUE(at::equal(exact.to(at::kBFloat16), rounded));
    EXPECT_EQ(seen.layer->weight.grad().scalar_type(), at::kFloat) << "what a user sees has the parameter's dtype";
    const auto bytes = [](OneProduct& one) {
      return engine::find_units(*one.layer).at(0)->memory().sharded_gradient_bytes;
    };
    EXPECT_EQ(bytes(wide), 2 * bytes(narrow));
    EXPECT_EQ(bytes(wide), bytes(seen));
  });
}

TEST(GradientsDroppedInBackward, HaveTheParametersDtypeWhereTheyStay) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    OneProduct one(world, at::kBFloat16), twice(world, at::kFloat, /*steps=*/false);
    one.onlooker->drops = false;
    auto& weight = one.layer->weight;
    for (auto* each : {&one, &twice}) each->backward();
    ASSERT_EQ(weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(weight.grad(), twice.layer->weight.grad().to(at::kBFloat16).to(at::kFloat)));
    const auto want = weight.grad() + twice.layer->weight.grad();
    for (auto* each : {&one, &twice}) each->backward();
    ASSERT_EQ(weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(weight.grad(), want, 1e-6)) << "added up in fp32";
    one.onlooker.reset();
    weight.mutable_grad() = at::Tensor();
    one.backward();
    twice.layer->weight.mutable_grad() = at::Tensor();
    twice.backward();
    EXPECT_TRUE(at::equal(weight.grad(), twice.layer->weight.grad())) << "nobody steps any more";
  });
}

TEST(GradientsDroppedInBackward, HaveTheParametersDtypeForHooksAndOnSeveralRanks) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    OneProduct one(world, at::kBFloat16);
    c10::ScalarType hooked = at::kByte;
    register_post_accumulate_grad_hook(one.layer->weight,
                                       [&](const at::Tensor& p) { hooked = p.grad().scalar_type(); });
    one.backward();
    EXPECT_EQ(hooked, at::kFloat);
  });
  run_local_world(2, [](std::shared_ptr<World> world) {
    OneProduct one(world, at::kBFloat16);
    one.backward();
    ASSERT_EQ(one.onlooker->given.size(), 1U);
    EXPECT_EQ(one.onlooker->given[0].scalar_type(), at::kFloat);
  });
}

class KeptCastShard : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, KeptCastShard, ::testing::Values(1, 2, 3));

TEST_P(KeptCastShard, ChangesNoBit) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    for (bool in_backward : {false, true}) {
      How how{.in_backward = in_backward, .casts = true};
      auto want = trained(world, how);
      how.keep_cast = true;
      expect_equal(trained(world, how), want);
    }
  });
}

// What a forward sees: the shard, cast, whoever wrote it last.
TEST_P(KeptCastShard, FollowsEveryWayOfWriting) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    auto options = with_casts(true);
    shard_tiny_net(net, Mesh::shard(world), options, options);
    auto& weight = net->head->weight;
    auto expect_seen = [&](const char* after) {
      auto unit = unit_of(*net);
      auto want = full_tensor(weight).to(at::kBFloat16);
      unit.unshard();
      EXPECT_TRUE(at::equal(weight, want)) << "after " << after;
      unit.reshard();
    };
    at::NoGradGuard no_grad;
    expect_seen("sharding");
    weight.mul_(1.7);
    expect_seen("an operator");
    weight.data().add_(0.3);
    expect_seen("an operator on data()");
    weight.mutable_grad() = at::ones_like(weight);
    optim::AdamW adam(*net, {.lr = 0.1});
    adam.step();
    expect_seen("AdamW");
    weight.mutable_grad() = at::ones_like(weight);
    optim::SGD(*net, {.lr = 0.1}).step();
    expect_seen("an optimizer that writes the shard alone");
    weight.set_data(at::full_like(weight, 0.123));
    expect_seen("set_data");
  });
}

TEST_P(KeptCastShard, IsCountedInTheMemoryFormula) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto net = make_tiny_net(), plain = make_tiny_net();
    auto kept = with_casts(true), cast = with_casts(false);
    shard_tiny_net(net, Mesh::shard(world), kept, kept);
    shard_tiny_net(plain, Mesh::shard(world), cast, cast);
    const auto with = memory_formula(*net), without = memory_formula(*plain);
    EXPECT_EQ(without.cast_shards, 0);
    EXPECT_EQ(2 * with.cast_shards, with.shards);
    EXPECT_EQ(with.gathered, world->size() == 1 ? 0 : without.gathered);
    auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
    EXPECT_LE(reserved_buffer_bytes(*net), with.gathered + with.gradients + with.staging);
  });
}

}  // namespace
}  // namespace fsdpp::test

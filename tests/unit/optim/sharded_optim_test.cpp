#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>

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
using ::testing::HasSubstr;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Gives the sharded parameter this rank's part of a global gradient.
void set_grad(const at::Tensor& param, const at::Tensor& full) {
  param.mutable_grad() = shard::local_part(sharding_of(param), full);
}
at::Tensor full_grad(const at::Tensor& param) { return shard::full_tensor(sharding_of(param), param.grad()); }

/// u [8] on the parent stays replicated; W [8] on the child is sharded.
struct HalfSharded {
  std::shared_ptr<Bag> child = bag({{"W", at::ones({8})}});
  std::shared_ptr<Bag> model = std::make_shared<Bag>(test::Named{{"u", at::ones({8})}}, child);
  explicit HalfSharded(const std::shared_ptr<comm::World>& world) { fully_shard(child, comm::Mesh::shard(world)); }
};

TEST(ShardedClip, CountsReplicatedParametersOnce) {
  comm::run_local_world(4, [](std::shared_ptr<comm::World> world) {
    HalfSharded m(world);
    set_grad((*m.child)["W"], at::ones({8}));
    (*m.model)["u"].mutable_grad() = at::ones({8});
    EXPECT_EQ(grad_norm(*m.model, 1.0), 16.0);
    EXPECT_EQ(grad_norm(*m.model, kInfinity), 1.0);
    EXPECT_EQ(clip_grad_norm_(*m.model, 2.0), 4.0);
    EXPECT_NEAR(full_grad((*m.child)["W"]).sum().item<double>(), 4.0, 1e-5);
    EXPECT_NEAR((*m.model)["u"].grad()[7].item<double>(), 0.5, 1e-6);
  });
}

/// One sharded w [4] on two ranks, with this mean gradient.
void with_grad(const std::vector<float>& values, const std::function<void(Bag&, const at::Tensor&)>& body) {
  comm::run_local_world(2, [&](std::shared_ptr<comm::World> world) {
    const auto model = bag({{"w", at::ones({4})}});
    fully_shard(model, comm::Mesh::shard(world));
    const at::Tensor w = (*model)["w"];
    if (!values.empty()) set_grad(w, at::tensor(values));
    body(*model, w);
  });
}

TEST(ShardedClip, OfAnInfiniteGradientThenRaisesEverywhereBeforeScaling) {
  with_grad({1.5F, 1.5F, 1.5F, INFINITY}, [](Bag& model, const at::Tensor& w) {
    EXPECT_THROW(clip_grad_norm_(model, 1.0, 2.0, /*error_if_nonfinite=*/true), Error);
    EXPECT_TRUE(at::equal(full_grad(w), at::tensor({1.5F, 1.5F, 1.5F, INFINITY})));
  });
}

TEST(ShardedClip, OfAnInfiniteGradientThenScalesAsTorchDoes) {
  with_grad({1.5F, 1.5F, 1.5F, INFINITY}, [](Bag& model, const at::Tensor& w) {
    EXPECT_EQ(clip_grad_norm_(model, 1.0), kInfinity);
    const at::Tensor grad = full_grad(w);
    EXPECT_EQ(grad.narrow(0, 0, 3).abs().sum().item<double>(), 0);
    EXPECT_TRUE(std::isnan(grad[3].item<double>()));
  });
}

TEST(ShardedClip, OfANanThenNanOnEveryRank) {
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const size_t where : {size_t{0}, size_t{3}}) {
      std::vector<float> values{1.5F, INFINITY, 1.5F, 1.5F};
      values[where] = NAN;
      with_grad(values, [&](Bag& model, const at::Tensor&) {
        EXPECT_TRUE(std::isnan(clip_grad_norm_(model, 1.0, p))) << p << where;
      });
    }
  }
}

TEST(ShardedClip, OfZerosThenZeroAndOfNothingThenZero) {
  with_grad({0, 0, 0, 0}, [](Bag& model, const at::Tensor& w) {
    EXPECT_EQ(clip_grad_norm_(model, 1.0), 0.0);
    EXPECT_TRUE(at::equal(full_grad(w), at::tensor({0.F, 0.F, 0.F, 0.F})));
  });
  with_grad({}, [](Bag& model, const at::Tensor&) { EXPECT_EQ(clip_grad_norm_(model, 1.0), 0.0); });
}

TEST(ShardedClip, WhenOnlyOneRankHasAnythingThenSameNumberEverywhere) {
  comm::run_local_world(3, [](std::shared_ptr<comm::World> world) {
    const auto model = bag({{"w", at::ones({1, 5})}});  // one row: one rank owns it
    fully_shard(model, comm::Mesh::shard(world));
    set_grad((*model)["w"], at::ones({1, 5}) * 2);
    EXPECT_NEAR(clip_grad_norm_(*model, 1.0), std::sqrt(20.0), 1e-12);
  });
}

TEST(ShardedClip, OnAGridOfReplicasCountsEachShardOnce) {
  comm::run_local_world(4, [](std::shared_ptr<comm::World> world) {
    const auto model = bag({{"W", at::ones({128})}});
    fully_shard(model, comm::Mesh::hybrid(world, 2));
    set_grad((*model)["W"], at::ones({128}));
    ASSERT_EQ((*model)["W"].numel(), 64);
    EXPECT_EQ(grad_norm(*model), std::sqrt(128.0));
    EXPECT_EQ(grad_norm(*model, 1.0), 128.0);
    EXPECT_EQ(clip_grad_norm_(*model, std::sqrt(32.0)), std::sqrt(128.0));
    EXPECT_NEAR((*model)["W"].grad()[0].item<double>(), 0.5, 1e-6);
  });
}

/// Gradients that lie one behind the other, as the engine's do, in sums that depend on the order of additions.
TEST(ShardedClip, OnOneRankIsTheUnshardedNormBitForBit) {
  comm::run_local_world(1, [](std::shared_ptr<comm::World> world) {
    test::Named params;
    for (int64_t n = 1; n <= 40; ++n) params.emplace_back(std::to_string(n), at::ones({n * 37 % 101 + 1}));
    const auto sharded = bag(params);
    const auto plain = bag(params);
    fully_shard(sharded, comm::Mesh::shard(world));
    for (int seed = 0; seed < 10; ++seed) {
      const at::Tensor flat = (at::ones({40 * 101}).cumsum(0) * (1.3 + seed)).sin();
      int64_t begin = 0;
      for (const auto& [name, value] : params) {
        (*sharded)[name].mutable_grad() = flat.narrow(0, begin, value.numel());
        (*plain)[name].mutable_grad() = flat.narrow(0, begin, value.numel()).clone();
        begin += value.numel();
      }
      for (const double p : {0.5, 2.0, 3.0}) EXPECT_EQ(grad_norm(*sharded, p), grad_norm(*plain, p)) << p;
    }
  });
}

/// Units on two meshes, one of them with replicas; a parameter of no unit; rows that don't divide.
struct MixedMeshes {
  std::shared_ptr<Bag> a = bag({{"w", at::ones({71, 3})}, {"b", at::ones({55}, at::kDouble)}});
  std::shared_ptr<Bag> c = bag({{"w", at::ones({199})}, {"one", at::ones({1})}});
  std::shared_ptr<Bag> model = bag({{"u", at::ones({4})}, {"none", at::ones({2})}});
  MixedMeshes() {
    model->register_module("a", a);
    model->register_module("c", c);
  }
  void shard(const std::shared_ptr<comm::World>& world) const {
    fully_shard(a, comm::Mesh::shard(world, "flat"));
    fully_shard(c, comm::Mesh::hybrid(world, 2, "grid"));
  }
};

at::Tensor wave(const at::Tensor& like, double phase) {
  const at::Tensor values = at::ones(like.sizes(), like.scalar_type()).cumsum(0);
  return (values * 1.7 + phase).sin() * 3;
}

TEST(ShardedClip, OverMixedMeshesMatchesLibTorchForEveryOrder) {
  for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
    MixedMeshes plain;
    double phase = 0;
    for (const auto& item : plain.model->named_parameters()) {
      if (item.key() != "none") item.value().mutable_grad() = wave(item.value(), phase += 0.3);
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& param : plain.model->parameters())
      gradients.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
    const double expected = torch::nn::utils::clip_grad_norm_(plain.model->parameters(), 0.5, p);
    comm::run_local_world(4, [&](std::shared_ptr<comm::World> world) {
      const MixedMeshes m;
      m.shard(world);
      const auto params = m.model->parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        if (!gradients[i].defined()) continue;
        if (i > 1) {
          set_grad(params[i], gradients[i]);
        } else {
          params[i].mutable_grad() = gradients[i].clone();
        }
      }
      fsdpp::test::EventLog log(fsdpp::test::EventLog::What::Collectives);
      const double norm = clip_grad_norm_(*m.model, 0.5, p);
      EXPECT_EQ(log.take(), std::vector<std::string>(2, "all_reduce grad_norm"));
      EXPECT_NEAR(norm, expected, 1e-6 * expected) << p;
      for (size_t i = 0; i < params.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const at::Tensor want = plain.model->parameters()[i].grad();
        const at::Tensor got = i > 1 ? full_grad(params[i]) : params[i].grad();
        EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-7)) << p << " parameter " << i;
      }
    });
  }
}

TEST(ShardedClip, OfANanOnAnyMeshThenNanOnEveryRank) {
  for (const bool on_grid : {false, true}) {
    comm::run_local_world(4, [&](std::shared_ptr<comm::World> world) {
      const MixedMeshes m;
      m.shard(world);
      at::Tensor grad = at::ones({199});
      grad[198] = NAN;
      if (on_grid) set_grad((*m.c)["w"], grad);
      set_grad((*m.a)["w"], on_grid ? at::ones({71, 3}) : at::full({71, 3}, NAN));
      EXPECT_TRUE(std::isnan(grad_norm(*m.model)));
      EXPECT_TRUE(std::isnan(grad_norm(*m.model, kInfinity)));
      EXPECT_FALSE(grads_are_finite(*m.model));
    });
  }
}

TEST(ShardedClip, FiniteGradientsAreSaidToBe) {
  with_grad({1.F, 3e38F, -3e38F, 0.F}, [](Bag& model, const at::Tensor&) { EXPECT_TRUE(grads_are_finite(model)); });
  with_grad({1.F, 1.F, 1.F, -INFINITY}, [](Bag& model, const at::Tensor&) { EXPECT_FALSE(grads_are_finite(model)); });
  with_grad({}, [](Bag& model, const at::Tensor&) { EXPECT_TRUE(grads_are_finite(model)); });
}

const test::Named kParams{
    {"a", at::ones({13, 8})}, {"b", at::ones({13})}, {"c", at::ones({3, 5, 7})}, {"d", at::ones({1})}};

TEST(ShardedAdamW, MatchesTheUnshardedOneBitForBit) {
  for (const int ranks : {1, 2, 3, 4}) {
    comm::run_local_world(ranks, [&](std::shared_ptr<comm::World> world) {
      const auto sharded = bag(kParams);
      const auto plain = bag(kParams);
      fully_shard(sharded, comm::Mesh::shard(world));
      AdamW ours(*sharded, {.lr = 0.1});
      AdamW reference(*plain, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        for (const auto& [name, value] : kParams) {
          if (step == 1 && name == "b") continue;  // its step count falls behind
          const at::Tensor grad = (value * (step + 2)).sin() + at::ones(value.sizes()).cumsum(0);
          set_grad((*sharded)[name], grad);
          (*plain)[name].mutable_grad() = grad;
        }
        ours.step();
        reference.step();
        ours.zero_grad();
        reference.zero_grad();
      }
      for (const auto& [name, value] : kParams) {
        const at::Tensor p = (*sharded)[name];
        EXPECT_TRUE(at::equal(full_tensor(p), (*plain)[name].detach())) << name << ", ranks " << ranks;
        const auto state = ours.state(p);
        EXPECT_EQ(state.exp_avg.sizes().vec(), sharding_of(p).local_sizes());
        EXPECT_TRUE(at::equal(shard::full_tensor(sharding_of(p), state.exp_avg_sq),
                              reference.state((*plain)[name]).exp_avg_sq));
        EXPECT_EQ(state.step, name == "b" ? 2 : 3);
      }
    });
  }
}

TEST(ShardedSGD, MatchesTheUnshardedOneBitForBit) {
  comm::run_local_world(3, [&](std::shared_ptr<comm::World> world) {
    const auto sharded = bag(kParams);
    const auto plain = bag(kParams);
    fully_shard(sharded, comm::Mesh::shard(world));
    const SGDOptions options{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true};
    SGD ours(*sharded, options);
    SGD reference(*plain, options);
    for (int step = 0; step < 3; ++step) {
      for (const auto& [name, value] : kParams) {
        if (step == 0 && name == "b") continue;  // its buffer begins later
        const at::Tensor grad = (value * (step + 2)).sin() + at::ones(value.sizes()).cumsum(0);
        set_grad((*sharded)[name], grad);
        (*plain)[name].mutable_grad() = grad;
      }
      ours.step();
      reference.step();
    }
    for (const auto& [name, value] : kParams) {
      const at::Tensor p = (*sharded)[name];
      EXPECT_TRUE(at::equal(full_tensor(p), (*plain)[name].detach())) << name;
      EXPECT_TRUE(at::equal(shard::full_tensor(sharding_of(p), ours.momentum_buffer(p)),
                            reference.momentum_buffer((*plain)[name])));
    }
  });
}

TEST(ShardedAdamW, GroupsOfOneUnitAreUpdatedEachByItsOwnOptions) {
  comm::run_local_world(2, [&](std::shared_ptr<comm::World> world) {
    const auto sharded = bag(kParams);
    const auto plain = bag(kParams);
    fully_shard(sharded, comm::Mesh::shard(world));
    const auto groups = [](const Bag& m) {
      return std::vector<ParamGroup<AdamWOptions>>{
          {{m["a"], m["c"]}, {.lr = 0.1, .weight_decay = 0.5}},
          {{m["b"], m["d"]}, {.lr = 0.2, .weight_decay = 0, .offload_state = true}}};
    };
    AdamW ours(groups(*sharded));
    AdamW reference(groups(*plain));
    for (int step = 0; step < 2; ++step) {
      for (const auto& [name, value] : kParams) {
        const at::Tensor grad = at::ones(value.sizes()).cumsum(0) - 3;
        set_grad((*sharded)[name], grad);
        (*plain)[name].mutable_grad() = grad;
      }
      ours.step();
      reference.step();
    }
    for (const auto& [name, value] : kParams)
      EXPECT_TRUE(at::equal(full_tensor((*sharded)[name]), (*plain)[name].detach())) << name;
  });
}

TEST(ShardedAdamW, MadeBeforeShardingHasStateOfTheShards) {
  comm::run_local_world(2, [](std::shared_ptr<comm::World> world) {
    const auto model = bag({{"w", at::ones({64})}});
    AdamW adamw(*model, {.lr = 0.1, .weight_decay = 0});
    SGD sgd(*model, {.lr = 0.1});
    const UnitHandle unit = fully_shard(model, comm::Mesh::shard(world));
    set_grad((*model)["w"], at::full({64}, 1.5));
    sgd.step();
    EXPECT_TRUE(at::allclose(full_tensor((*model)["w"]), at::full({64}, 0.85), 0, 1e-6));
    adamw.step();
    EXPECT_TRUE(at::allclose(full_tensor((*model)["w"]), at::full({64}, 0.75), 0, 1e-6));
    EXPECT_EQ(adamw.state((*model)["w"]).exp_avg.numel(), 32);
    EXPECT_EQ(adamw.state_bytes(), 2 * 32 * 4);
    adamw.zero_grad();
    EXPECT_FALSE((*model)["w"].grad().defined());
    unit.unshard();
    (*model)["w"].mutable_grad() = at::ones({64});
    try {
      adamw.step();
      ADD_FAILURE() << "expected a UsageError";
    } catch (const UsageError& e) {  // it knows by now that the parameter is sharded
      EXPECT_THAT(e.what(), HasSubstr("reshard()"));
    }
    (*model)["w"].mutable_grad() = at::Tensor();
    unit.reshard();
  });
}

TEST(ShardedAdamW, WhileUnshardedThenUsageErrorNamesTheParameter) {
  comm::run_local_world(2, [](std::shared_ptr<comm::World> world) {
    const auto model = bag({{"w", at::ones({64, 64})}});
    const UnitHandle unit = fully_shard(model, comm::Mesh::shard(world));
    AdamW optimizer(*model);
    set_grad((*model)["w"], at::ones({64, 64}));
    const at::Tensor grad = (*model)["w"].grad();
    unit.unshard();
    (*model)["w"].mutable_grad() = at::ones({64, 64});
    try {
      optimizer.step();
      ADD_FAILURE() << "expected a UsageError";
    } catch (const UsageError& e) {
      EXPECT_THAT(e.what(), HasSubstr("'w'"));
      EXPECT_THAT(e.what(), HasSubstr("reshard()"));
    }
    (*model)["w"].mutable_grad() = at::Tensor();
    unit.reshard();
    (*model)["w"].mutable_grad() = grad;
    EXPECT_NO_THROW(optimizer.step());
  });
}

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl() {
    weight = register_parameter("weight", at::randn({12, 8}));
    bias = register_parameter("bias", at::randn({12}));
    gain = register_parameter("gain", at::randn({12}));
  }
  at::Tensor forward(const at::Tensor& x) { return (at::linear(x, weight, bias) * gain).sin(); }
  at::Tensor weight, bias, gain;
};
FSDPP_MODULE(Block);

TEST(ShardedAdamW, AfterARealBackwardMatchesUnshardedTraining) {
  for (const int ranks : {1, 2, 3}) {
    comm::run_local_world(ranks, [&](std::shared_ptr<comm::World> world) {
      const auto make = [] {
        const auto init = bag({{"weight", at::ones({12, 8}).cumsum(0) * 0.1},
                               {"bias", at::ones({12}).cumsum(0)},
                               {"gain", at::ones({12}).cumsum(0)}});
        Block block;
        for (auto& p : block->named_parameters()) p.value().set_data((*init)[p.key()].detach().clone());
        return block;
      };
      Block sharded = make();
      Block plain = make();
      fully_shard(sharded, comm::Mesh::shard(world));
      AdamW ours(*sharded, {.lr = 0.01});
      AdamW reference(*plain, {.lr = 0.01});
      const at::Tensor x = at::ones({4, 8}).cumsum(1) * 0.01;
      for (int step = 0; step < 3; ++step) {
        sharded(x).sum().backward();
        plain->forward(x).sum().backward();
        const double norm = clip_grad_norm_(*sharded, 1.0);
        const double expected = clip_grad_norm_(*plain, 1.0);
        EXPECT_NEAR(norm, expected, 1e-5 * norm);
        if (ranks == 1) {
          EXPECT_EQ(norm, expected);
        }
        ours.step();
        reference.step();
        ours.zero_grad();
        reference.zero_grad();
      }
      for (auto& p : sharded->named_parameters()) {
        EXPECT_TRUE(at::allclose(full_tensor(p.value()), plain->named_parameters()[p.key()].detach(), 1e-5, 1e-6))
            << p.key();
      }
    });
  }
}

}  // namespace
}  // namespace fsdpp::optim

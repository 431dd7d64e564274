#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/world.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
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
        EXPECT_NEAR(norm, clip_grad_norm_(*plain, 1.0), 1e-5 * norm);
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

// Linear layers that write their weight gradients into the gradient buffer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "fsdpp/api/checkpoint.h"
#include "fsdpp/base/error.h"
#include "fsdpp/engine/gradient_target.h"
#include "fsdpp/ops/linear.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

constexpr int64_t kIn = 6, kOut = 9;
constexpr int kMicro = 3;

// A projection in three parts, then one that is used twice, then a parameter that is not a target.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool direct) : direct(direct) {
    weight = register_parameter("weight", at::zeros({kOut, kIn}));
    bias = register_parameter("bias", at::zeros({kOut}));
    mix = register_parameter("mix", at::zeros({kIn, 3}));
    scale = register_parameter("scale", at::zeros({kIn}));
    fill_parameters(*this, 7);
  }
  at::Tensor linear(const at::Tensor& x, const at::Tensor& w) const { return direct ? ops::linear(x, w) : at::linear(x, w); }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts = direct ? ops::split_linear(x, weight, bias, 3) : at::linear(x, weight, bias).chunk(3, -1);
    auto y = at::tanh(linear(parts[0] * parts[2], mix));
    return (y * scale + linear(parts[2], mix)).square().mean();  // parts[1] gets no gradient
  }
  bool direct;
  at::Tensor weight, bias, mix, scale;
};
FSDPP_MODULE(Net);

at::Tensor input(int seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn({2, 5, kIn}, generator);
}

std::vector<at::Tensor> gradients(std::shared_ptr<World> world, bool direct, int buffers, const MixedPrecisionPolicy& policy, bool sync_each) {
  Net net(direct);
  auto unit = fully_shard(net, Mesh::shard(world), {.mp_policy = policy});
  unit.set_reduce_scatter_max_input_buffers(buffers);
  for (int micro = 0; micro < kMicro; ++micro) {
    unit.set_requires_gradient_sync(sync_each || micro == kMicro - 1);
    net(input(10 * micro + world->rank())).backward();
  }
  std::vector<at::Tensor> result;
  for (auto& p : net->parameters()) result.push_back(shard::full_tensor(sharding_of(p), p.grad()));
  EXPECT_TRUE(unit.is_sharded());
  return result;
}

class DirectGradients : public ::testing::TestWithParam<std::tuple<int, int, bool, bool>> {};  // ranks, buffers, mixed, sync each

TEST_P(DirectGradients, EqualThoseOfOrdinaryLinears) {
  auto [ranks, buffers, mixed, sync_each] = GetParam();
  MixedPrecisionPolicy policy;
  if (mixed) policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  run_local_world(ranks, [&, buffers = buffers, mixed = mixed, sync_each = sync_each](std::shared_ptr<World> world) {
    auto want = gradients(world, false, buffers, policy, sync_each), got = gradients(world, true, buffers, policy, sync_each);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_GT(want[i].abs().sum().item<float>(), 0);
      EXPECT_LT(relative_error(got[i], want[i]), mixed ? 2e-2 : 1e-6) << "parameter " << i;
    }
  });
}
INSTANTIATE_TEST_SUITE_P(All, DirectGradients,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(1, 2), ::testing::Bool(), ::testing::Bool()));

struct ProbeImpl : torch::nn::Module {
  ProbeImpl() { w = register_parameter("w", at::ones({4, 3})); }
  at::Tensor forward(const at::Tensor& x) { return ops::linear(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Probe);

TEST(GradientTarget, ReducedInFp32ItKeepsWhatBf16WouldRound) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Probe probe;
    fully_shard(probe, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    auto x = at::ones({257, 3});
    probe(x).sum().backward();
    EXPECT_TRUE(at::equal(probe->w.grad(), at::full({4, 3}, 257.0)));  // bf16: 256 or 258
  });
}

struct RecomputedImpl : torch::nn::Module {
  RecomputedImpl() { probe = register_module("probe", Probe()); }
  at::Tensor forward(const at::Tensor& x) {
    auto run = [this](const at::Tensor& t) { return probe->forward(t); };
    return checkpoint(run, checkpoint(run, x).narrow(-1, 0, 3));
  }
  Probe probe{nullptr};
};
FSDPP_MODULE(Recomputed);

TEST(GradientTarget, IsFoundForAParameterThatRecomputationBringsBack) {
  for (int ranks : {1, 2})
    run_local_world(ranks, [&](std::shared_ptr<World> world) {
      Recomputed net;
      auto unit = fully_shard(net, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      unit.set_reduce_scatter_max_input_buffers(2);
      net(at::ones({257, 3})).sum().backward();
      // The second linear: 257 rows of 3. The first: 257 rows of 1, times the 4 rows of the second's weight. No bf16 is 771.
      auto want = at::full({4, 3}, 257.0 * 3);
      want.narrow(0, 0, 3).add_(257.0 * 4);
      EXPECT_TRUE(at::equal(shard::full_tensor(sharding_of(net->probe->w), net->probe->w.grad()), want)) << net->probe->w.grad();
    });
}

struct DetachedImpl : torch::nn::Module {
  DetachedImpl() { w = register_parameter("w", at::ones({4, 3})); }
  at::Tensor forward(const at::Tensor& x) {
    copy = w.detach().requires_grad_();
    return ops::linear(x, w) + ops::linear(2 * x, copy);
  }
  at::Tensor w, copy;
};
FSDPP_MODULE(Detached);

TEST(GradientTarget, ALeafThatSharesAParametersMemoryKeepsItsOwnGradient) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Detached net;
    fully_shard(net, Mesh::shard(world));
    net(at::ones({2, 3})).sum().backward();
    EXPECT_TRUE(at::equal(net->w.grad(), at::full({4, 3}, 2.0)));
    EXPECT_TRUE(at::equal(net->copy.grad(), at::full({4, 3}, 4.0)));
  });
}

TEST(GradientTarget, ThereIsNoneOutsideBackwardAndForPlainTensors) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Probe probe, plain;
    fully_shard(probe, Mesh::shard(world));
    EXPECT_FALSE(gradient_target(probe->w));
    plain(at::ones({2, 3})).sum().backward();
    EXPECT_TRUE(at::equal(plain->w.grad(), at::full({4, 3}, 2.0)));
  });
}

TEST(GradientTarget, OneBufferOnSeveralRanksGivesNone) {
  for (int buffers : {1, 2})
    run_local_world(2, [&](std::shared_ptr<World> world) {
      Probe probe;
      auto unit = fully_shard(probe, Mesh::shard(world));
      unit.set_reduce_scatter_max_input_buffers(buffers);
      bool given = false;
      auto x = at::ones({2, 3}).requires_grad_();
      auto y = probe(x);
      y.register_hook([&](const at::Tensor& g) {
        at::NoGradGuard no_grad;
        if (auto target = gradient_target(probe->w)) {
          given = true;
          target->out.fill_(5);
        }
        return g;
      });
      y.sum().backward();
      EXPECT_EQ(given, buffers == 2);
      auto grad = shard::full_tensor(sharding_of(probe->w), probe->w.grad());
      EXPECT_TRUE(at::equal(grad, at::full({4, 3}, buffers == 2 ? 7.0 : 2.0)));  // what was written and the linear's own
    });
}

TEST(SplitLinear, MisuseIsAnError) {
  auto x = at::ones({2, 3}).requires_grad_(), w = at::ones({4, 3}).requires_grad_();
  EXPECT_THROW((void)ops::split_linear(x, w, {}, 3), UsageError);
  EXPECT_THROW((void)ops::linear(x, w, at::ones({1})), UsageError);
  EXPECT_THROW((void)ops::linear(x, w, at::ones({5})), UsageError);
  auto y = ops::linear(x, w).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

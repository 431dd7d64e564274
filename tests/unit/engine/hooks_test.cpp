// The user's own hooks on parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adamw.h>

#include "fsdpp/base/error.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

std::vector<at::Tensor> plainly_trained(int ranks, int steps) {
  auto net = make_tiny_net();
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3));
  for (int step = 0; step < steps; ++step) {
    adam.zero_grad();
    for (int r = 0; r < ranks; ++r) {
      auto ids = tokens(10 * step + r);
      (token_loss(net(ids), ids) / ranks).backward();
    }
    adam.step();
  }
  return net->parameters();
}

class OptimizerInBackward : public ::testing::TestWithParam<std::tuple<int, bool>> {};  // ranks, offload

TEST_P(OptimizerInBackward, TrainsLikeAnOptimizerAfterIt) {
  auto [ranks, offload] = GetParam();
  auto want = plainly_trained(ranks, 4);
  run_local_world(ranks, [&, ranks = ranks, offload = offload](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    FullyShardOptions options;
    if (offload) options.offload_policy.emplace();
    shard_tiny_net(net, Mesh::shard(world), options, options);
    std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
    for (auto& p : net->parameters()) {
      optimizers.push_back(std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{p}, torch::optim::AdamWOptions(0.01).eps(1e-3)));
      register_post_accumulate_grad_hook(p, [adam = optimizers.back().get(), p](const at::Tensor& handle) {
        EXPECT_TRUE(handle.is_same(p));
        EXPECT_EQ(handle.sizes(), handle.grad().sizes());
        adam->step();
        adam->zero_grad();
      });
    }
    for (int step = 0; step < 4; ++step) {
      auto ids = tokens(10 * step + world->rank());
      token_loss(net(ids), ids).backward();
      for (auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
    }
    auto params = net->parameters();
    for (size_t i = 0; i < params.size(); ++i) EXPECT_LT(relative_error(full_tensor(params[i]), want[i]), 1e-6) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerInBackward, ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()));

TEST(ParameterHooks, RunOncePerReductionAndNotWithoutSynchronisation) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    int calls = 0;
    register_post_accumulate_grad_hook(net->head->weight, [&](const at::Tensor&) { ++calls; });
    auto ids = tokens(world->rank());
    for (bool sync : {false, false, true}) {
      unit_of(*net).set_requires_gradient_sync(sync);
      token_loss(net(ids), ids).backward();
      EXPECT_EQ(calls, sync ? 1 : 0);
    }
    EXPECT_THROW(register_post_accumulate_grad_hook(at::ones({2}), [](const at::Tensor&) {}), UsageError);
  });
}

struct CountCalls : torch::autograd::PostAccumulateGradHook {
  explicit CountCalls(std::vector<std::vector<int64_t>>& s) : shapes(s) {}
  void operator()(const at::Tensor& p) override { shapes.push_back(p.grad().sizes().vec()); }
  std::vector<std::vector<int64_t>>& shapes;
};

TEST(ParameterHooks, OneOfLibTorchSetBeforeShardingRunsAfterTheReduction) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    std::vector<std::vector<int64_t>> shapes;
    torch::autograd::impl::set_post_acc_grad_hooks(net->head->weight, std::make_unique<CountCalls>(shapes));
    shard_tiny_net(net, Mesh::shard(world));
    auto ids = tokens(world->rank());
    token_loss(net(ids), ids).backward();
    EXPECT_EQ(shapes, std::vector<std::vector<int64_t>>{sharding_of(net->head->weight).local_sizes()});
  });
}

TEST(ParameterHooks, OneOfLibTorchSetAfterShardingIsAnErrorNotALostGradient) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    std::vector<std::vector<int64_t>> shapes;
    torch::autograd::impl::set_post_acc_grad_hooks(net->head->weight, std::make_unique<CountCalls>(shapes));
    auto ids = tokens(world->rank());
    EXPECT_THROW(token_loss(net(ids), ids).backward(), UsageError);
  });
}

TEST(ParameterHooks, TensorHooksSeeTheUnshardedGradientOfThisRank) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    std::vector<int64_t> seen;
    net->head->weight.register_hook([&](const at::Tensor& g) { seen = g.sizes().vec(); });
    auto ids = tokens(world->rank());
    token_loss(net(ids), ids).backward();
    EXPECT_EQ(seen, (std::vector<int64_t>{23, 7}));
  });
}

}  // namespace
}  // namespace fsdpp::test

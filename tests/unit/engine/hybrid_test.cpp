// Meshes of replicas and shards, resharding to groups, and the switches around reduction.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "fsdpp/base/error.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

struct Vec : torch::nn::Module {
  explicit Vec(int64_t n, double value = 1.0) { w = register_parameter("w", at::full({n}, value)); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};

std::vector<at::Tensor> plain_gradients(int world, int micro = 1) {
  auto net = make_tiny_net();
  for (int k = 0; k < micro; ++k)
    for (int r = 0; r < world; ++r) {
      auto ids = tokens(10 * k + r);
      (token_loss(net(ids), ids) / micro / world).backward();
    }
  std::vector<at::Tensor> grads;
  for (auto& p : net->parameters()) grads.push_back(p.grad().clone());
  return grads;
}

void expect_gradients(TinyNet& net, const std::vector<at::Tensor>& want) {
  auto params = net->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    ASSERT_TRUE(params[i].grad().defined());
    auto full = shard::full_tensor(sharding_of(params[i]), params[i].grad());
    EXPECT_LT(relative_error(full, want[i]), 1e-6) << "parameter " << i;
  }
}

UnitStats total_stats(TinyNet& net) {
  UnitStats sum;
  for (auto& u : units(*net)) {
    auto s = u.stats();
    sum.forward_gathers += s.forward_gathers, sum.backward_gathers += s.backward_gathers, sum.reduces += s.reduces, sum.all_reduces += s.all_reduces;
  }
  return sum;
}

class Hybrid : public ::testing::TestWithParam<std::pair<int, int>> {};  // world, replicas

TEST_P(Hybrid, GradientsAreTheMeanOverAllRanks) {
  auto [ranks, replicas] = GetParam();
  auto want = plain_gradients(ranks);
  run_local_world(ranks, [&, replicas = replicas](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    auto mesh = Mesh::hybrid(world, replicas);
    EXPECT_EQ(mesh->shard_size() * mesh->replicate_size(), world->size());
    shard_tiny_net(net, mesh);
    auto ids = tokens(world->rank());
    token_loss(net(ids), ids).backward();
    expect_gradients(net, want);
    EXPECT_EQ(total_stats(net).all_reduces, replicas > 1 ? 4 : 0);
  });
}

TEST_P(Hybrid, AllReduceCanWaitForTheLastMicrobatch) {
  auto [ranks, replicas] = GetParam();
  auto want = plain_gradients(ranks, 3);
  for (bool defer_sync : {false, true})
    run_local_world(ranks, [&, replicas = replicas](std::shared_ptr<World> world) {
      auto net = make_tiny_net();
      shard_tiny_net(net, Mesh::hybrid(world, replicas));
      auto root = unit_of(*net);
      for (int k = 0; k < 3; ++k) {
        root.set_requires_all_reduce(k == 2);
        if (defer_sync) root.set_requires_gradient_sync(k == 2);
        auto ids = tokens(10 * k + world->rank());
        (token_loss(net(ids), ids) / 3).backward();
      }
      expect_gradients(net, want);
      EXPECT_EQ(total_stats(net).reduces, defer_sync ? 4 : 12);
      EXPECT_EQ(total_stats(net).all_reduces, replicas > 1 ? 4 : 0);
    });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Hybrid, ::testing::Values(std::pair{4, 2}, std::pair{4, 4}, std::pair{2, 2}, std::pair{4, 1}, std::pair{3, 3}));

TEST(HybridMesh, ReplicasThatDoNotDivideTheWorldAreAnError) {
  run_local_world(3, [](std::shared_ptr<World> world) { EXPECT_THROW((void)Mesh::hybrid(world, 2), ConfigError); });
}

TEST(ReshardToGroup, BackwardGathersAmongNeighboursAndGivesTheSameGradients) {
  auto want = plain_gradients(4);
  for (int group : {1, 2, 4})
    run_local_world(4, [&](std::shared_ptr<World> world) {
      auto net = make_tiny_net();
      FullyShardOptions options{.reshard_after_forward = group};
      shard_tiny_net(net, Mesh::shard(world), options, options);
      auto ids = tokens(world->rank());
      token_loss(net(ids), ids).backward();
      expect_gradients(net, want);
      EXPECT_EQ(total_stats(net).backward_gathers, group == 1 ? 0 : 4);
      for (auto& u : units(*net)) EXPECT_TRUE(u.is_sharded());
    });
  run_local_world(4, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    EXPECT_THROW(fully_shard(net, Mesh::shard(world), {.reshard_after_forward = 3}), ConfigError);
  });
}

TEST(Switches, DivideFactorAndHookSeeTheReducedGradient) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto m = std::make_shared<Vec>(4);
    auto unit = fully_shard(m, Mesh::shard(world));
    unit.set_gradient_divide_factor(1.0);
    (call(*m) * (world->rank() + 1)).backward();
    EXPECT_TRUE(at::equal(m->w.grad(), at::full_like(m->w.grad(), 3.0)));
    m->w.mutable_grad() = at::Tensor();
    int calls = 0;
    unit.set_gradient_divide_factor(2.0);
    unit.set_all_reduce_hook([&](const at::Tensor& slice) { ++calls, slice.mul_(10); });
    (call(*m) * (world->rank() + 1)).backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::equal(m->w.grad(), at::full_like(m->w.grad(), 15.0)));
    EXPECT_THROW(unit.set_gradient_divide_factor(0), ConfigError);
  });
}

TEST(Switches, UnusedParametersCanBeReducedAsZeros) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto a = std::make_shared<Vec>(4), b = std::make_shared<Vec>(4);
    for (auto& m : {a, b}) fully_shard(m, mesh).set_reduce_scatter_unused_params(true);
    for (int step = 1; step <= 2; ++step) {
      auto x = call(*a), y = call(*b);
      ((world->rank() == 0 ? x : y) * 2.0).backward();  // rank 0 uses a, rank 1 uses b
      for (auto& m : {a, b}) EXPECT_TRUE(at::equal(m->w.grad(), at::full_like(m->w.grad(), 1.0 * step)));
    }
  });
}

TEST(Switches, IgnoredParametersAreLeftAlone) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    auto ignored = net->head->weight;
    fully_shard(net, Mesh::shard(world), {.ignored_params = {ignored}});
    auto ids = tokens(world->rank());
    token_loss(net(ids), ids).backward();
    EXPECT_EQ(ignored.sizes(), (std::vector<int64_t>{23, 7}));
    EXPECT_EQ(ignored.grad().sizes(), ignored.sizes());
    EXPECT_THROW((void)sharding_of(ignored), UsageError);
  });
}

TEST(Switches, ExplicitPrefetchListsChangeTheOrderNotTheResult) {
  auto want = plain_gradients(2);
  std::mutex mutex;
  std::vector<std::string> gathers;
  comm::LocalWorldOptions options;
  options.on_operation = [&](const comm::OperationEvent& e) {
    std::lock_guard lock(mutex);
    if (e.rank == 0 && e.op == "all_gather" && e.label != "model check" && !e.label.empty()) gathers.push_back(e.label);
    return comm::Fault::None;
  };
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    auto block = [&](int i) { return unit_of(*net->blocks[i]); };
    unit_of(*net).set_modules_to_forward_prefetch({block(0), block(1), block(2)});
    block(2).set_modules_to_backward_prefetch({block(1), block(0)});
    auto ids = tokens(world->rank());
    token_loss(net(ids), ids).backward();
    expect_gradients(net, want);
    EXPECT_EQ(total_stats(net).forward_gathers, 4);
    EXPECT_EQ(total_stats(net).backward_gathers, 3);
  }, options);
  std::vector<std::string> first(gathers.begin(), gathers.begin() + 7);
  EXPECT_THAT(first, ::testing::ElementsAre("root unit, gather", "block0", "block1", "block2", "block2", "block1", "block0"));
}

TEST(Switches, ResetAfterAnExceptionInBackwardLeavesAUsableModel) {
  auto want = plain_gradients(2);
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    auto ids = tokens(world->rank());
    for (bool explicit_reset : {true, false}) {
      auto loss = token_loss(net(ids), ids);
      auto x = at::ones({1}).requires_grad_();
      auto bad = loss * x;
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("injected"); });
      loss.register_hook([](const at::Tensor& g) { return g; });
      EXPECT_ANY_THROW(bad.backward());
      if (explicit_reset) unit_of(*net).reset_iter_state();
      for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
    }
    token_loss(net(ids), ids).backward();
    expect_gradients(net, want);
    for (auto& u : units(*net)) EXPECT_TRUE(u.is_sharded());
  });
}

}  // namespace
}  // namespace fsdpp::test

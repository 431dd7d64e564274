// Shards and gradients in the host's memory. On a CPU mesh the copies go from memory to memory: same steps, same buffers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

constexpr MixedPrecisionPolicy kMixed{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

struct Case {
  int ranks, replicas;
  CPUOffloadPolicy offload;
  bool mixed;
};

// Weights after three steps of two microbatches; the first of each without synchronisation in the second step, reduced one by one
// in the others. Gradients are kept as zeros after the second step.
std::vector<at::Tensor> train(std::shared_ptr<World> world, const Case& c, bool offload) {
  auto net = make_tiny_net();
  FullyShardOptions options;
  if (c.mixed) options.mp_policy = kMixed;
  if (offload) options.offload_policy = c.offload;
  shard_tiny_net(net, Mesh::hybrid(world, c.replicas), options, options);
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-3));
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      unit_of(*net).set_requires_gradient_sync(step != 1 || micro == 1);
      auto ids = tokens(100 * step + 10 * micro + world->rank());
      token_loss(net(ids), ids).backward();
    }
    adam.step();
    adam.zero_grad(/*set_to_none=*/step != 1);
  }
  std::vector<at::Tensor> result;
  for (auto& p : net->parameters()) result.push_back(full_tensor(p));
  auto formula = memory_formula(*net, /*accumulates=*/true);
  EXPECT_LE(reserved_buffer_bytes(*net), formula.gathered + formula.gradients + formula.staging);
  return result;
}

class Offload : public ::testing::TestWithParam<Case> {};

TEST_P(Offload, TrainsToTheSameBits) {
  run_local_world(GetParam().ranks, [](std::shared_ptr<World> world) {
    auto want = train(world, GetParam(), false), got = train(world, GetParam(), true);
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << "parameter " << i;
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (auto [ranks, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 2}})
    for (bool mixed : {false, true})
      for (auto [params, gradients] : {std::pair{true, true}, {true, false}, {false, true}})
        all.push_back({ranks, replicas, {.params = params, .gradients = gradients}, mixed});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Offload, ::testing::ValuesIn(cases()), [](auto& info) {
  auto& c = info.param;
  return "Ranks" + std::to_string(c.ranks) + "x" + std::to_string(c.replicas) + (c.mixed ? "Mixed" : "Full") + (c.offload.params ? "Params" : "") +
         (c.offload.gradients ? "Gradients" : "");
});

TEST(OffloadMemory, FormulaCountsHostAndDeviceApart) {
  run_local_world(2, [](std::shared_ptr<World> world) {
    auto on_device = make_tiny_net(), on_host = make_tiny_net();
    FullyShardOptions options{.mp_policy = kMixed};
    auto mesh = Mesh::shard(world, "device"), other = Mesh::shard(world, "host");
    shard_tiny_net(on_device, mesh, options, options);
    options.offload_policy.emplace();
    shard_tiny_net(on_host, other, options, options);
    auto a = memory_formula(*on_device), b = memory_formula(*on_host);
    EXPECT_EQ(a.host, 0);
    EXPECT_EQ(a.staging, 0);
    EXPECT_EQ(b.shards, 0);
    EXPECT_EQ(b.sharded_gradients, 0);
    EXPECT_EQ(b.host, a.shards + a.sharded_gradients);
    EXPECT_EQ(b.gathered, a.gathered);
    EXPECT_GT(b.staging, 0);
    EXPECT_LT(b.total(), a.total());
  });
}

TEST(OffloadMemory, OneRankGathersAndGivesBackToo) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    FullyShardOptions options;
    options.offload_policy.emplace();
    shard_tiny_net(net, Mesh::shard(world), options, options);
    auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
    EXPECT_GT(reserved_buffer_bytes(*net), 0);
    for (auto& u : units(*net)) {
      EXPECT_TRUE(u.is_sharded());
      EXPECT_GT(u.memory().gathered_bytes, 0);
    }
  });
}

}  // namespace
}  // namespace fsdpp::test

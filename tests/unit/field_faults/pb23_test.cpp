// Hybrid sharding: replicas that start from different weights.
#include <torch/optim/sgd.h>

#include <mutex>

#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

struct Vec : torch::nn::Module {
  explicit Vec(double value) {
    w = register_parameter("w", at::full({8}, value));
    b = register_buffer("b", at::full({2}, value));
  }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w, b;
};

/// One step on four ranks; every rank's gathered weight and buffer. A rank builds its model with the value 1 + spread · rank.
std::vector<std::pair<at::Tensor, at::Tensor>> step(int replicas, double spread) {
  std::vector<std::pair<at::Tensor, at::Tensor>> results(4);
  each_rank(4, [&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Vec>(1.0 + spread * world->rank());
    fully_shard(m, replicas > 1 ? Mesh::hybrid(world, replicas) : Mesh::shard(world));
    torch::optim::SGD sgd(m->parameters(), torch::optim::SGDOptions(0.1));
    (call(*m) * (world->rank() + 1)).backward();
    sgd.step();
    results[world->rank()] = {full_tensor(m->w), m->b.clone()};
    EXPECT_TRUE(nothing_unsharded(*m));
  });
  return results;
}

TEST(Replicas, PB23_DifferentStartsThenEveryRankHasRankZerosWeightsAndBuffers) {
  const auto results = step(2, 1.0);
  for (auto& [weight, buffer] : results) {
    EXPECT_TRUE(at::allclose(weight, at::full({8}, 0.75), 0, 1e-6)) << weight;
    EXPECT_TRUE(at::equal(weight, results[0].first)) << "replicas differ";
    EXPECT_TRUE(at::equal(buffer, at::ones({2}))) << buffer;
  }
}

TEST(Replicas, PB23_EqualStartsThenTwoByTwoEqualsFourWaySharding) {
  const auto hybrid = step(2, 0.0), plain = step(1, 0.0);
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_TRUE(at::allclose(plain[r].first, at::full({8}, 0.75), 0, 1e-6)) << plain[r].first;
    EXPECT_TRUE(at::equal(hybrid[r].first, plain[r].first)) << "rank " << r;
  }
}

}  // namespace
}  // namespace fsdpp::test

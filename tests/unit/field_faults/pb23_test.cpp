// Hybrid sharding: replicas that start from different weights.
#include <torch/optim/sgd.h>

#include <mutex>

#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

struct Vec : torch::nn::Module {
  explicit Vec(double value, int64_t n) {
    w = register_parameter("w", at::full({n}, value));
    b = register_buffer("b", at::full({2}, value));
  }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w, b;
};

/// Of 8 elements one rank of a shard group owns all; of 512 each owns a part.
constexpr int64_t kLengths[] = {8, 512};

/// One step on four ranks; every rank's gathered weight and buffer. A rank builds its model with the value 1 + spread · rank.
std::vector<std::pair<at::Tensor, at::Tensor>> step(int replicas, double spread, int64_t n) {
  std::vector<std::pair<at::Tensor, at::Tensor>> results(4);
  each_rank(4, [&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Vec>(1.0 + spread * world->rank(), n);
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
  for (int64_t n : kLengths) {
    const auto results = step(2, 1.0, n);
    for (auto& [weight, buffer] : results) {
      EXPECT_TRUE(all_near(weight, 0.75));
      EXPECT_TRUE(at::equal(weight, results[0].first)) << "replicas differ";
      EXPECT_TRUE(all_equal(buffer, 1));
    }
  }
}

TEST(Replicas, PB23_EqualStartsThenTwoByTwoEqualsFourWaySharding) {
  for (int64_t n : kLengths) {
    const auto hybrid = step(2, 0.0, n), plain = step(1, 0.0, n);
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_TRUE(all_near(plain[r].first, 0.75));
      EXPECT_TRUE(at::equal(hybrid[r].first, plain[r].first)) << "rank " << r;
    }
  }
}

}  // namespace
}  // namespace fsdpp::test

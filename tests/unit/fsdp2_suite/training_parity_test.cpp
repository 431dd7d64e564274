// Sharded training equals plain training on the union of the ranks' batches: test_fully_shard_training.py's train_parity tests.
#include <gtest/gtest-spi.h>

#include "unit/fsdp2_suite/parity_bodies.h"

namespace fsdpp::test::suite {
namespace {

class TrainParity : public ::testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
  static void for_each_reshard(const std::function<void(const Rank&, Reshard)>& body) {
    for (auto reshard : reshard_choices(size())) each_rank(size(), [&](Rank world) { body(world, reshard); });
  }
};

TEST_P(TrainParity, SingleGroup) {
  for (std::array<int64_t, 3> dims : {std::array<int64_t, 3>{16, 15, 8}, {7, 15, 3}, {16, 17, 8}})
    for_each_reshard([&](const Rank& world, Reshard reshard) { train_parity_single_group(world, dims, reshard); });
}
TEST_P(TrainParity, MultiGroup) {
  for (auto delay : {Delay::None, Delay::Everywhere})
    for_each_reshard([&](const Rank& world, Reshard reshard) { train_parity_multi_group(world, reshard, delay); });
  for (auto delay : kSingleDelays) each_rank(size(), [&](Rank world) { train_parity_multi_group(world, true, delay); });
}
TEST_P(TrainParity, MultiGroupUnshardAsyncOp) {
  for (auto delay : {Delay::None, Delay::Everywhere})
    each_rank(size(), [&](Rank world) { train_parity_multi_group(world, true, delay, /*unshard_async=*/true); });
}
TEST_P(TrainParity, NonRootForwardBackward) { each_rank(size(), non_root_forward_backward); }
TEST_P(TrainParity, MultiForwardModule) { for_each_reshard(multi_forward_module); }
TEST_P(TrainParity, ExplicitPrefetching) { each_rank(size(), explicit_prefetching); }
TEST_P(TrainParity, PostOptimEvent) { each_rank(size(), post_optim_event); }
TEST_P(TrainParity, SharedParams) {
  for (auto tying : kTyings)
    for_each_reshard([&](const Rank& world, Reshard reshard) { train_parity_with_shared_params(world, reshard, tying); });
}
TEST_P(TrainParity, SharedParamsUnevenShard) { for_each_reshard(train_shared_params_uneven_shard); }

INSTANTIATE_TEST_SUITE_P(Ranks, TrainParity, ::testing::Values(1, 2, 3, 4));

class TrainParityHsdp : public ::testing::TestWithParam<std::pair<int, int>> {};  // ranks, replicas
TEST_P(TrainParityHsdp, WithAndWithoutReductionOfEveryMicroBatch) {
  auto [ranks, replicas] = GetParam();
  for (int64_t dim : {3, 17})
    for (bool reshard : {false, true})
      for (bool last_only : {false, true})
        each_rank(ranks, [&, replicas = replicas](Rank world) { train_parity_hsdp(world, replicas, dim, reshard, last_only); });
}
INSTANTIATE_TEST_SUITE_P(Meshes, TrainParityHsdp, ::testing::Values(std::pair{4, 2}, std::pair{2, 2}, std::pair{4, 4}));

// The comparison itself: one weight that is off by 1e-5 relative is seen.
TEST(TrainParityChecker, SeesASmallDifference) {
  testing::TestPartResultArray failures;
  {
    using Reporter = testing::ScopedFakeTestPartResultReporter;
    Reporter reporter(Reporter::INTERCEPT_ALL_THREADS, &failures);
    each_rank(1, [&](Rank world) {
      auto a = filled(Mlp(4), *world), b = filled(Mlp(4), *world);
      at::NoGradGuard no_grad;
      a->in_proj->weight.mul_(1 + 1e-5);
      fully_shard(a, Mesh::shard(world));
      expect_same_parameters(*a, *b);
    });
  }
  EXPECT_EQ(failures.size(), 1);
}

}  // namespace
}  // namespace fsdpp::test::suite

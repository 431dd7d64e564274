// What ranks tell each other in each backward: the order of their collectives, and for which parameters they had gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "fsdpp/base/error.h"
#include "support/forwarding_world.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct PairImpl : torch::nn::Module {
  explicit PairImpl(c10::ScalarType second = at::kFloat) {
    e0 = register_parameter("e0", at::ones({4}));
    e1 = register_parameter("e1", at::ones({4}, second));
  }
  at::Tensor forward(int which) { return 2.0 * (which == 0 ? e0 : e1).sum().to(at::kFloat); }
  at::Tensor e0, e1;
};
FSDPP_MODULE(Pair);

struct OneImpl : torch::nn::Module {
  explicit OneImpl(double value) { w = register_parameter("w", at::full({64}, value)); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};
FSDPP_MODULE(One);

void expect_full(const at::Tensor& p, double grad) {
  ASSERT_TRUE(p.grad().defined());
  EXPECT_TRUE(at::equal(shard::full_tensor(sharding_of(p), p.grad()).to(at::kFloat), at::full({4}, grad)));
}

TEST(GradientFlags, RanksThatUseDifferentParametersOfOneUnitAllGetBothGradients) {
  for (auto second : {at::kFloat, at::kBFloat16})  // of one buffer, and of two
    for (int replicas : {1, 2})
      run_local_world(2, [&](std::shared_ptr<World> world) {
        Pair pair(second);
        fully_shard(pair, Mesh::hybrid(world, replicas));
        for (int step = 1; step <= 2; ++step) {
          pair(world->rank()).backward();
          expect_full(pair->e0, step);  // added up: the gradients are not dropped in between
          expect_full(pair->e1, step);
        }
      });
}

TEST(GradientFlags, AParameterThatNoRankUsesKeepsNoGradient) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    Pair pair;
    fully_shard(pair, Mesh::shard(world));
    pair(0).backward();
    expect_full(pair->e0, 2);
    EXPECT_FALSE(pair->e1.grad().defined());
  });
}

TEST(GradientFlags, AGradientThatALaterBackwardDoesNotReachStaysAsItIs) {
  for (int ranks : {1, 2})
    run_local_world(ranks, [&](std::shared_ptr<World> world) {
      Pair pair;
      fully_shard(pair, Mesh::shard(world));
      (pair(0) + pair(1)).backward();
      pair(0).backward();
      expect_full(pair->e0, 4);
      expect_full(pair->e1, 2);
    });
}

TEST(GradientFlags, WithoutSynchronisationTheyAreAddedUpForTheLastBackward) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    Pair pair;
    auto unit = fully_shard(pair, Mesh::shard(world));
    unit.set_requires_gradient_sync(false);
    pair(world->rank()).backward();
    unit.set_requires_gradient_sync(true);
    pair(0).backward();
    expect_full(pair->e0, 3);
    expect_full(pair->e1, 1);
  });
}

// Sizes fit, so nothing but the order's hash tells.
TEST(OrderCheck, RanksThatCallUnitsInDifferentOrdersGetAnErrorThatNamesThem) {
  std::atomic<int> caught = 0;
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(std::make_shared<UnlabelledWorld>(world));
    struct Both : torch::nn::Module {
      One first{1.0}, second{2.0};
      Both() { register_module("first", first), register_module("second", second); }
      at::Tensor forward(bool swap) {
        auto a = swap ? second() : first();
        auto b = swap ? first() : second();
        return a + b;
      }
    };
    auto both = std::make_shared<Both>();
    fully_shard(both->first, mesh);
    fully_shard(both->second, mesh);
    fully_shard(both, mesh);
    call(*both, false).backward();
    auto loss = call(*both, world->rank() == 1);
    try {
      loss.backward();
    } catch (const CommError& e) {
      EXPECT_EQ(e.code(), CommErrc::Mismatch);
      EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 0 had [gather of unit 'first'"), HasSubstr("rank 1 [gather of unit 'second'")));
      ++caught;
    }
    for (auto& u : units(*both)) EXPECT_TRUE(u.is_sharded());
  });
  EXPECT_EQ(caught, 2);
}

TEST(OrderCheck, OneExchangeForEachSynchronisedBackward) {
  std::atomic<int> exchanges = 0;
  comm::LocalWorldOptions options;
  options.on_operation = [&](const comm::OperationEvent& e) {
    if (e.label == "step check") ++exchanges;
    return comm::Fault::None;
  };
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    for (bool sync : {false, true, true}) {
      unit_of(*net).set_requires_gradient_sync(sync);
      auto ids = tokens(1);
      token_loss(net(ids), ids).backward();
    }
    at::NoGradGuard no_grad;
    (void)net(tokens(1));
  }, options);
  EXPECT_EQ(exchanges, 2 * 2);
}

}  // namespace
}  // namespace fsdpp::test

// Wrong uses end in an error that names what and how to mend it, on every rank, and leave the model usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using comm::Mesh;
using comm::run_local_world;
using comm::World;

template <class E, class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another type: ") + e.what();
  }
  return "no error";
}

class Misuse : public ::testing::TestWithParam<int> {};

TEST_P(Misuse, ForwardPastTheHolderIsAnErrorOnEveryRank) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    auto ids = tokens(world->rank());
    (void)net(ids);
    for (bool grad : {true, false}) {
      at::AutoGradMode mode(grad);
      EXPECT_THAT(message_of<UsageError>([&] { (void)net->forward(ids); }),
                  AllOf(HasSubstr("embed.weight"), HasSubstr("sharded"), HasSubstr("->forward")));
      EXPECT_THAT(message_of<UsageError>([&] { (void)net->blocks[1]->forward(at::ones({2, 7})); }), HasSubstr("block1"));
    }
    token_loss(net(ids), ids).backward();  // still works
  });
}

TEST_P(Misuse, OptimizerStyleUseOfShardsIsAllowed) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    at::NoGradGuard no_grad;
    for (auto& p : net->parameters()) {
      auto before = p.clone();
      p.mul_(2).add_(at::ones_like(p), 0.5);
      EXPECT_TRUE(at::equal(p.detach(), before * 2 + 0.5));
    }
  });
}

TEST_P(Misuse, ShardingTwiceIsAnError) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto net = make_tiny_net();
    shard_tiny_net(net, mesh);
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net->blocks[0], mesh); }), AllOf(HasSubstr("twice"), HasSubstr("TinyBlock")));
  });
}

TEST_P(Misuse, ParameterOnAnotherDeviceIsAnErrorAndChangesNothing) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    torch::nn::Linear layer(3, 2);
    auto original = layer->weight.clone();
    layer->register_parameter("extra", at::empty({2}, at::TensorOptions(at::kMeta)));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(layer, mesh); }), AllOf(HasSubstr("extra"), HasSubstr("meta"), HasSubstr("cpu")));
    EXPECT_TRUE(at::equal(layer->weight, original));
  });
}

TEST(Misuse, DifferentModelOnOneRankIsAnErrorOnEveryRank) {
  run_local_world(3, [](std::shared_ptr<World> world) {
    auto net = make_tiny_net(1, world->rank() == 1 ? 4 : 3);
    shard_tiny_net(net, Mesh::shard(world));
    auto text = message_of<UsageError>([&] { (void)net(tokens(0)); });
    EXPECT_THAT(text, AllOf(HasSubstr("not the same on all ranks"), HasSubstr("rank 1"), HasSubstr("block")));
  });
}

TEST_P(Misuse, ExceptionInForwardLeavesTheUnitsShardedAndUsable) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world));
    auto ids = tokens(world->rank());
    for (int i = 0; i < 2; ++i) {
      EXPECT_ANY_THROW((void)net(ids + 1000));  // beyond the vocabulary
      for (auto& u : units(*net)) EXPECT_TRUE(u.is_sharded());
      token_loss(net(ids), ids).backward();
      for (auto& p : net->parameters()) EXPECT_TRUE(p.grad().defined());
    }
  });
}

TEST_P(Misuse, ViewOfAGatheredParameterThatOutlivesForwardIsAnError) {
  run_local_world(GetParam(), [](std::shared_ptr<World> world) {
    torch::nn::Linear layer(4, 4);
    FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16}, .reshard_after_forward = true};
    fully_shard(layer, Mesh::shard(world), options);
    at::Tensor kept;
    call_as(*layer, [&] { kept = layer->weight.detach().t(); return at::zeros({1}); });
    EXPECT_THAT(message_of<UsageError>([&] { (void)at::mm(kept, kept); }), HasSubstr("given back"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Misuse, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdpp::test

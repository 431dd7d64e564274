// After Megatron-FSDP v2's suite (tests/unit_tests/distributed/mfsdp_v2): what FSDP2's own suite has no test for. Memory: memory_test.cpp;
// overlap: overlap_test.cpp; ranges: state_test.cpp; layouts: tests/unit/shard.
#include <torch/optim/adam.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::ElementsAre;
using Names = std::vector<std::string>;

constexpr int kSteps = 4;

/// Loss of each step on one rank's batch, after `prepare` sharded the model (or did not).
std::vector<double> losses_of(Rank world, const std::function<void(TinyNet&)>& prepare, int batches) {
  auto net = filled(TinyNet(23, 7, 3), *world);
  prepare(net);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2).eps(1e-3));
  std::vector<at::Tensor> losses;
  for (int s = 0; s < kSteps; ++s) {
    adam.zero_grad();
    at::Tensor first;
    for (int r = 0; r < batches; ++r) {
      auto ids = tokens(100 * s + (batches > 1 ? r : world->rank())).to(world->device());
      auto loss = token_loss(net(ids), ids.flip(0));
      (loss / batches).backward();
      if (batches == 1 || r == world->rank()) first = loss.detach();
    }
    adam.step();
    losses.push_back(first);
  }
  std::vector<double> values;
  for (auto& l : losses) values.push_back(l.item<double>());
  return values;
}

TEST(Hsdp, LossesMatchBaseline) {
  for (auto [ranks, replicas] : {std::pair{4, 2}, {4, 4}, {2, 2}, {6, 3}})
    each_rank(ranks, [&, replicas = replicas](Rank world) {
      auto plain = losses_of(world, [](TinyNet&) {}, world->size());
      auto flat = losses_of(world, [&](TinyNet& net) { shard_tiny_net(net, Mesh::shard(world)); }, 1);
      auto hybrid = losses_of(world, [&](TinyNet& net) { shard_tiny_net(net, Mesh::hybrid(world, replicas)); }, 1);
      for (int s = 0; s < kSteps; ++s) {
        EXPECT_NEAR(flat[s], plain[s], 1e-5 * plain[s]) << "step " << s;
        EXPECT_NEAR(hybrid[s], plain[s], 1e-5 * plain[s]) << "step " << s;
      }
      EXPECT_NE(plain[0], plain[kSteps - 1]);
    });
}

Names collectives(EventLog& log) { return log.take_without({"all_gather"}); }

TEST(Hsdp, DefersDpOuterAllreduceToLastMicrobatch) {
  each_rank(4, [](Rank world) {
    auto sharded = filled(TinyNet(23, 7, 1), *world), plain = filled(TinyNet(23, 7, 1), *world);
    shard_tiny_net(sharded, Mesh::hybrid(world, 2));
    auto root = unit_of(*sharded);
    auto micro = [&](TinyNet& net, int k, int rank) {
      auto ids = tokens(10 * k + rank).to(world->device());
      return token_loss(net(ids), ids) / 3;
    };
    for (int step = 0; step < 2; ++step) {
      for (auto& p : sharded->parameters()) p.mutable_grad() = at::Tensor();
      EventLog log(EventLog::What::Collectives, *world);
      for (int k = 0; k < 3; ++k) {
        root.set_requires_all_reduce(k == 2);
        micro(sharded, k, world->rank()).backward();
        auto names = collectives(log);
        EXPECT_EQ(count_events(names, "reduce_scatter"), 2) << "micro-batch " << k;
        EXPECT_EQ(count_events(names, "all_reduce"), k == 2 ? 2 : 0) << "micro-batch " << k;
        for (auto& p : sharded->parameters()) EXPECT_EQ(p.grad().defined(), k == 2) << "micro-batch " << k;
      }
    }
    for (int k = 0; k < 3; ++k)
      for (int r = 0; r < 4; ++r) (micro(plain, k, r) / 4).backward();
    expect_same_parameters(*sharded, *plain, 1e-6, 1e-6);
  });
}

// Each unit's all-reduce follows its reduce-scatter, on the slice that this left.
TEST(Hsdp, AllReduceFollowsTheUnitsReduceScatter) {
  each_rank(4, [](Rank world) {
    auto net = filled(TinyNet(23, 7, 2), *world);
    shard_tiny_net(net, Mesh::hybrid(world, 2));
    auto ids = tokens(world->rank()).to(world->device());
    auto loss = token_loss(net(ids), ids);
    EventLog log(EventLog::What::Collectives, *world);
    loss.backward();
    auto names = collectives(log);
    for (std::string unit : {"block1", "block0"}) {
      auto scatter = std::find(names.begin(), names.end(), "reduce_scatter " + unit), all = std::find(names.begin(), names.end(), "all_reduce " + unit);
      ASSERT_NE(scatter, names.end());
      ASSERT_NE(all, names.end());
      EXPECT_LT(scatter - names.begin(), all - names.begin()) << unit;
    }
    EXPECT_EQ(names.size(), 6u);
  });
}

// -- tied children -------------------------------------------------------------------------------------------------------

/// y = x · Wᵀ with the embedding's W.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(at::Tensor weight) : w(register_parameter("weight", std::move(weight))) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, w.t()); }
  at::Tensor w;
};
FSDPP_MODULE(TiedHead);
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    embed = register_module("embed", torch::nn::Embedding(23, 7));
    block = register_module("block", TinyBlock(7));
    head = register_module("head", TiedHead(embed->weight));
  }
  at::Tensor forward(const at::Tensor& ids) { return head(block(embed(ids))); }
  Hooked<torch::nn::Embedding> embed{nullptr};
  TinyBlock block{nullptr};
  TiedHead head{nullptr};
};
FSDPP_MODULE(TiedNet);

/// Which modules become units.
enum class Tie { BothInRoot, InOneUnit, InTwoUnits, FirstOnly, SecondOnly };

void shard_tied(TiedNet& net, const std::shared_ptr<Mesh>& mesh, Tie tie) {
  FullyShardOptions options{.reshard_after_forward = true};
  if (tie == Tie::InOneUnit) fully_shard({net->embed.ptr(), net->head.ptr()}, mesh, options);
  if (tie == Tie::InTwoUnits || tie == Tie::FirstOnly) fully_shard(net->embed, mesh, options);
  if (tie == Tie::InTwoUnits || tie == Tie::SecondOnly) fully_shard(net->head, mesh, options);
  fully_shard(net->block, mesh, options);
  fully_shard(net, mesh);
}

class TiedChildParameters : public ::testing::TestWithParam<Tie> {};
INSTANTIATE_TEST_SUITE_P(Units, TiedChildParameters, ::testing::Values(Tie::BothInRoot, Tie::InOneUnit, Tie::InTwoUnits, Tie::FirstOnly, Tie::SecondOnly));

TEST_P(TiedChildParameters, TrainAsUnsharded) {
  for (int ranks : {1, 2, 3})
    each_rank(ranks, [](Rank world) {
      TiedNet sharded, plain;
      for (auto* net : {&sharded, &plain}) *net = filled(*net, *world);
      shard_tied(sharded, Mesh::shard(world), GetParam());
      ASSERT_EQ(sharded->parameters().size(), plain->parameters().size());
      auto loss = [](TiedNet net) {
        return Trainee{net.ptr(), [net](const at::Tensor& ids, int) mutable { return token_loss(net(ids), ids.flip(0)); }};
      };
      expect_train_parity(*world, loss(sharded), loss(plain), [&](int i, int r) { return tokens(10 * i + r).to(world->device()); }, {.iterations = 4, .tolerance = 1e-5});
      EXPECT_TRUE(sharded->head->w.is_same(sharded->embed->weight));
    });
}

// The shared parameter belongs to one unit: it is gathered and reduced there, and stored once.
TEST(TiedChildParameters, BelongToOneUnit) {
  each_rank(2, [](Rank world) {
    auto net = filled(TiedNet(), *world);
    shard_tied(net, Mesh::shard(world), Tie::InTwoUnits);
    EXPECT_EQ(unit_of(*net->embed).parameters().size(), 1u);
    EXPECT_TRUE(unit_of(*net->head).parameters().empty());
    EventLog log(EventLog::What::Collectives, *world);
    auto ids = tokens(world->rank()).to(world->device());
    token_loss(net(ids), ids).backward();
    EXPECT_EQ(count_events(log.seen(), "reduce_scatter embed"), 1);
    EXPECT_EQ(count_events(log.seen(), "reduce_scatter"), 2);
  });
}

}  // namespace
}  // namespace fsdpp::test::suite

// After test_fully_shard_comm.py: collectives, their counts, divide factors, explicit unshard. Order of events: comm_prefetch_test.cpp.
#include <gtest/gtest-spi.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::IsEmpty;

constexpr int kBlocks = 3;
using Log = EventLog;

/// Embedding and head in the root unit, each block a unit.
TinyNet tiny_net(const World& world, const std::shared_ptr<Mesh>& mesh, const FullyShardOptions& options = {}) {
  auto net = filled(TinyNet(23, 7, kBlocks), world);
  shard_tiny_net(net, mesh, options, options);
  return net;
}
at::Tensor ids_of(const World& world, uint64_t seed = 0) { return tokens(100 * seed + world.rank()).to(world.device()); }

/// WireCounts of what went over the wire, where nothing else did.
WireCounts counts_of(const std::vector<std::string>& events) {
  auto c = wire_counts(events);
  EXPECT_EQ(c.all_gathers + c.reduce_scatters + c.all_reduces, static_cast<int64_t>(events.size())) << "other collectives were seen";
  return c;
}

/// What went over the wire in a forward and a backward of step `seed`.
std::pair<WireCounts, WireCounts> count_step(TinyNet& net, const World& world, Log& log, uint64_t seed = 0) {
  (void)log.take();
  auto ids = ids_of(world, seed);
  auto loss = token_loss(net(ids), ids);
  auto forward = counts_of(log.take());
  loss.backward();
  return {forward, counts_of(log.take())};
}

// -- collectives ---------------------------------------------------------------------------------------------------------

class CollectiveOps : public ::testing::TestWithParam<int> {};

TEST_P(CollectiveOps, AllGatherFp32) {
  each_rank(GetParam(), [](Rank world) {
    auto plain = filled(Mlp(5, 7, 3), *world);
    for (bool async : {false, true}) {
      auto mlp = filled(Mlp(5, 7, 3), *world);
      auto unit = fully_shard(mlp, Mesh::shard(world));
      EXPECT_TRUE(unit.is_sharded());
      unit.unshard(async);
      if (async) unit.wait_unshard();
      for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(mlp->parameters()[i].detach(), plain->parameters()[i].detach()));
      unit.reshard();
      EXPECT_TRUE(unit.is_sharded());
      expect_handles_show_shards(*mlp);
      expect_same_parameters(*mlp, *plain, 0.0);
    }
  });
}

// Gradient of w is the input. Each rank adds its number to a pattern; the mean is known to the last bit.
struct DotImpl : torch::nn::Module {
  DotImpl(int64_t rows, int64_t columns) { w = register_parameter("w", at::zeros({rows, columns})); }
  at::Tensor forward(const at::Tensor& x) { return (w * x).sum(); }
  at::Tensor w;
};
FSDPP_MODULE(Dot);

TEST_P(CollectiveOps, ReduceScatterFp32) {
  each_rank(GetParam(), [](Rank world) {
    auto dot = filled(Dot(5, 3), *world);
    fully_shard(dot, Mesh::shard(world));
    auto pattern = at::arange(15, at::kFloat).view({5, 3}).to(world->device());
    dot(pattern * world->size() + world->rank()).backward();
    EXPECT_TRUE(at::equal(full_grad(dot->w), pattern * world->size() + (world->size() - 1) / 2.0));
  });
}

// Without a division ahead of the sum, fp16 would overflow at 65504.
TEST_P(CollectiveOps, ReduceScatterFp16) {
  each_rank(GetParam(), [](Rank world) {
    auto dot = filled(Dot(5, 3), *world);
    fully_shard(dot, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}});
    dot(at::full({5, 3}, 24576.0, world->device())).backward();
    EXPECT_EQ(dot->w.grad().scalar_type(), at::kFloat);
    auto want = at::full({5, 3}, 24576.0, world->device());
    EXPECT_LT(relative_error(full_grad(dot->w), want), world->size() == 3 ? 1e-3 : 1e-9);
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    a = register_parameter("a", at::full({5, 2}, 2.0));
    b = register_parameter("b", at::full({3}, 3.0, at::kBFloat16));
  }
  at::Tensor forward() { return a.sum() + 2 * b.to(at::kFloat).sum(); }
  at::Tensor a, b;
};
FSDPP_MODULE(Mixed);

// One unit, two dtypes: a buffer for each, one event for all of them.
TEST_P(CollectiveOps, MixedDtypesInOneUnitTravelTogether) {
  each_rank(GetParam(), [](Rank world) {
    Mixed mixed;
    mixed->to(world->device());
    auto unit = fully_shard(mixed, Mesh::shard(world));
    Log log(Log::What::UnitsAndCollectives, *world);
    mixed().backward();
    bool wire = world->size() > 1;
    EXPECT_EQ(counts_of(log.take_without({"unshard", "reshard", "post_backward"})), wire ? (WireCounts{2, 2, 0}) : WireCounts{});
    EXPECT_EQ(unit.stats().gathers, 1);
    EXPECT_EQ(unit.stats().reduces, 1);
    EXPECT_TRUE(at::equal(full_grad(mixed->a), at::ones_like(full_tensor(mixed->a))));
    EXPECT_TRUE(at::equal(full_grad(mixed->b), at::full_like(full_tensor(mixed->b), 2.0)));
    EXPECT_EQ(mixed->b.grad().scalar_type(), at::kBFloat16);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveOps, ::testing::Values(1, 2, 3, 4));

// -- counts --------------------------------------------------------------------------------------------------------------

TEST(Communication, FullyShardCommunicationCount) {
  for (Reshard reshard : {Reshard{}, Reshard{true}, Reshard{false}, Reshard{2}})
    each_rank(4, [&](Rank world) {
      auto net = tiny_net(*world, Mesh::shard(world), {.reshard_after_forward = reshard});
      Log log(Log::What::Collectives, *world);
      int64_t again = !reshard ? kBlocks : reshard->group() == 1 ? 0 : kBlocks + 1;
      for (uint64_t step = 0; step < 3; ++step) {
        auto [forward, backward] = count_step(net, *world, log, step);
        EXPECT_EQ(forward, (WireCounts{.all_gathers = kBlocks + 1}));
        EXPECT_EQ(backward, (WireCounts{.all_gathers = again, .reduce_scatters = kBlocks + 1}));
      }
      auto stats = total_stats(*net);
      EXPECT_EQ(stats.forward_gathers, 3 * (kBlocks + 1));
      EXPECT_EQ(stats.backward_gathers, 3 * again);
      EXPECT_EQ(stats.reduces, 3 * (kBlocks + 1));
    });
}

TEST(Communication, HybridMeshAddsOneAllReduceAUnit) {
  each_rank(4, [](Rank world) {
    auto net = tiny_net(*world, Mesh::hybrid(world, 2));
    Log log(Log::What::Collectives, *world);
    auto [forward, backward] = count_step(net, *world, log);
    EXPECT_EQ(forward, (WireCounts{.all_gathers = kBlocks + 1}));
    EXPECT_EQ(backward, (WireCounts{.all_gathers = kBlocks, .reduce_scatters = kBlocks + 1, .all_reduces = kBlocks + 1}));
  });
}

TEST(Communication, SingleRankPutsNothingOnTheWire) {
  each_rank(1, [](Rank world) {
    auto net = tiny_net(*world, Mesh::shard(world), {.reshard_after_forward = true});
    Log log(Log::What::Collectives, *world);
    EXPECT_EQ(count_step(net, *world, log), std::pair(WireCounts{}, WireCounts{}));
  });
}

TEST(Communication, ManualReshardWithReshardAfterForwardFalse) {
  each_rank(2, [](Rank world) {
    auto net = tiny_net(*world, Mesh::shard(world), {.reshard_after_forward = false});
    auto plain = filled(TinyNet(23, 7, kBlocks), *world);
    Log log(Log::What::Collectives, *world);
    auto ids = ids_of(*world);
    auto loss = token_loss(net(ids), ids);
    EXPECT_EQ(counts_of(log.take()), (WireCounts{.all_gathers = kBlocks + 1}));
    for (auto& u : units(*net)) EXPECT_FALSE(u.is_sharded()) << u.name();
    for (auto& u : units(*net)) u.reshard();
    expect_sharded(*net);
    expect_handles_show_shards(*net);
    loss.backward();
    EXPECT_EQ(counts_of(log.take()), (WireCounts{.all_gathers = kBlocks + 1, .reduce_scatters = kBlocks + 1}));
    for (int r = 0; r < 2; ++r) (token_loss(plain(tokens(r).to(world->device())), tokens(r).to(world->device())) / 2).backward();
    expect_same_parameters(*net, *plain, 1e-6, 1e-6);
  });
}

TEST(Communication, SetReshardAfterForward) {
  for (Reshard value : {Reshard{}, Reshard{true}, Reshard{false}, Reshard{2}})
    for (bool recurse : {true, false})
      each_rank(4, [&](Rank world) {
        FullyShardOptions options;
        if (value) options.reshard_after_forward = value->group() == 1;  // the opposite
        auto net = tiny_net(*world, Mesh::shard(world), options);
        if (value) unit_of(*net).set_reshard_after_forward(*value, recurse);
        Log log(Log::What::Collectives, *world);
        auto [forward, backward] = count_step(net, *world, log);
        int64_t again = !value ? kBlocks : value->group() == 1 ? (recurse ? 0 : kBlocks) : (recurse ? kBlocks + 1 : 1);
        EXPECT_EQ(forward, (WireCounts{.all_gathers = kBlocks + 1}));
        EXPECT_EQ(backward, (WireCounts{.all_gathers = again, .reduce_scatters = kBlocks + 1}));
      });
}

TEST(Communication, SetReshardAfterForwardWithABadGroupThenConfigErrorAndNothingChanges) {
  each_rank(4, [](Rank world) {
    auto net = tiny_net(*world, Mesh::shard(world));
    EXPECT_THROW(unit_of(*net).set_reshard_after_forward(3), ConfigError);
    EXPECT_THROW(unit_of(*net).set_reshard_after_forward(-1), ConfigError);
    Log log(Log::What::Collectives, *world);
    EXPECT_EQ(count_step(net, *world, log).second.all_gathers, kBlocks);
  });
}

// -- division ------------------------------------------------------------------------------------------------------------

struct DivideCase {
  int replicas;
  double factor;
};
class DivideFactor : public ::testing::TestWithParam<DivideCase> {};

// The root has a factor of its own; blocks keep the mean over ranks.
TEST_P(DivideFactor, SetReduceScatterDivideFactor) {
  each_rank(4, [](Rank world) {
    auto [replicas, factor] = GetParam();
    auto net = tiny_net(*world, Mesh::hybrid(world, replicas), {.reshard_after_forward = false});
    auto plain = filled(TinyNet(23, 7, kBlocks), *world);
    unit_of(*net).set_gradient_divide_factor(factor, /*recurse=*/false);
    for (int step = 0; step < 3; ++step) {
      auto ids = ids_of(*world, step);
      token_loss(net(ids), ids).backward();
      for (int r = 0; r < 4; ++r) {
        auto theirs = tokens(100 * step + r).to(world->device());
        (token_loss(plain(theirs), theirs) / 4).backward();
      }
    }
    plain->embed->weight.mutable_grad().mul_(4 / factor);
    plain->head->weight.mutable_grad().mul_(4 / factor);
    expect_same_parameters(*net, *plain, 1e-6, 1e-6);
    EXPECT_THROW(unit_of(*net).set_gradient_divide_factor(0.0), ConfigError);
    EXPECT_THROW(unit_of(*net).set_gradient_divide_factor(-2.0), ConfigError);
  });
}
INSTANTIATE_TEST_SUITE_P(Meshes, DivideFactor,
                         ::testing::Values(DivideCase{1, 8}, DivideCase{1, 4}, DivideCase{2, 8}, DivideCase{2, 4}, DivideCase{4, 8}, DivideCase{4, 1}));

TEST(DivideFactors, SetReduceScatterDivideFactorMixedPrecision) {
  each_rank(4, [](Rank world) {
    auto dot = filled(Dot(5, 3), *world);
    fully_shard(dot, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}).set_gradient_divide_factor(8);
    dot(at::full({5, 3}, world->rank() + 1.0, world->device())).backward();
    EXPECT_TRUE(at::equal(full_grad(dot->w), at::full({5, 3}, 10.0 / 8, world->device())));
  });
}

TEST(DivideFactors, Fp16DividesInTwoPartsByAnyFactor) {
  each_rank(4, [](Rank world) {
    auto dot = filled(Dot(5, 3), *world);
    fully_shard(dot, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kHalf}}).set_gradient_divide_factor(2);
    dot(at::full({5, 3}, 24576.0, world->device())).backward();
    EXPECT_TRUE(at::equal(full_grad(dot->w), at::full({5, 3}, 2 * 24576.0, world->device())));
  });
}

// -- reductions in flight ------------------------------------------------------------------------------------------------

// A matter of time and memory alone (time: overlap_test.cpp): the same bits.
TEST(ReduceScatterMaxInputBuffers, ChangeNoBit) {
  for (int replicas : {1, 2})
    for (bool reshard : {true, false})
      each_rank(4, [&](Rank world) {
        FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16}, .reshard_after_forward = reshard};
        std::vector<at::Tensor> want;
        for (int count : {0, 1, 3}) {
          auto net = tiny_net(*world, Mesh::hybrid(world, replicas), options);
          if (count) unit_of(*net).set_reduce_scatter_max_input_buffers(count);
          for (int step = 0; step < 3; ++step) token_loss(net(ids_of(*world, step)), ids_of(*world, step)).backward();
          for (size_t i = 0; i < net->parameters().size(); ++i) {
            auto grad = net->parameters()[i].grad();
            if (count == 0) want.push_back(grad.clone());
            EXPECT_TRUE(at::equal(grad, want[i])) << count << " in flight, parameter " << i;
          }
          auto formula = memory_formula(*net);
          EXPECT_LE(reserved_buffer_bytes(*net), formula.gathered + formula.gradients);
        }
      });
}

TEST(ReduceScatterMaxInputBuffers, Validation) {
  each_rank(1, [](Rank world) {
    auto net = filled(Mlp(8), *world);
    auto unit = fully_shard(net, Mesh::shard(world));
    EXPECT_THROW(unit.set_reduce_scatter_max_input_buffers(0), ConfigError);
    EXPECT_THROW(unit.set_reduce_scatter_max_input_buffers(-1), ConfigError);
    unit.set_reduce_scatter_max_input_buffers(2);
  });
}

// -- explicit unshard ----------------------------------------------------------------------------------------------------

// Every module is asked for early, its forward comes later, other collectives run in between on a communicator of the user's.
struct AsyncModelImpl : torch::nn::Module {
  explicit AsyncModelImpl(std::shared_ptr<comm::Communicator> c) : comm(std::move(c)) {
    for (int i = 0; i < 3; ++i) {
      first.push_back(register_parameter("first" + std::to_string(i), at::zeros({8, 8})));
      mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(8)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> y;
    for (size_t i = 0; i < 3; ++i) {
      y.push_back(at::relu(at::mm(x, first[i])));
      if (asks_ahead) unit_of(*mlps[i]).unshard(/*async=*/true);
      auto copy = y.back().detach().clone();
      auto stream = cuda::current_stream(copy.device());
      comm::Buffer buffer{copy.data_ptr(), copy.numel(), at::kFloat};
      if (comm) comm->all_reduce(buffer, buffer, comm::ReduceOp::Sum, stream, {}).wait(stream);
    }
    auto z0 = mlps[0](y[0]), z1 = mlps[1](y[1]), z2 = mlps[2](y[2]);
    return z0 + z1 + z2;
  }
  std::shared_ptr<comm::Communicator> comm;
  std::vector<at::Tensor> first;
  std::vector<Mlp> mlps;
  bool asks_ahead = false;
};
FSDPP_MODULE(AsyncModel);

TEST(UnshardMultiProcess, UnshardAsync) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto sharded = filled(AsyncModel(world->make_communicator("user", {})), *world), plain = filled(AsyncModel(std::shared_ptr<comm::Communicator>()), *world);
    for (auto& m : sharded->mlps) fully_shard(m, mesh, {.reshard_after_forward = false});
    fully_shard(sharded, mesh);
    sharded->asks_ahead = true;
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int r) { return random_input(*world, {2, 8}, 10 * i + r); });
    for (auto& m : sharded->mlps) EXPECT_EQ(unit_of(*m).stats().gathers, 10);  // one a step
    EXPECT_EQ(unit_of(*sharded->mlps[2]).stats().forward_gathers, 0);          // the user asked first
  });
}

TEST(UnshardMultiThread, UnshardNoParamGroup) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto stack = filled(MlpStack(4, 2), *world);
    for (auto& m : stack->mlps) fully_shard(m, mesh);
    auto root = fully_shard(stack, mesh);
    Log log(Log::What::Collectives, *world);
    root.unshard(/*async=*/true);
    root.wait_unshard();
    root.reshard();
    EXPECT_THAT(log.take(), IsEmpty());
    EXPECT_TRUE(root.parameters().empty());
    EXPECT_EQ(root.memory().gathered_bytes, 0);
  });
}

TEST(UnshardMultiThread, UnshardWithoutLazyInit) {
  each_rank(2, [](Rank world) {
    auto plain = filled(Mlp(4), *world), mlp = filled(Mlp(4), *world);
    auto unit = fully_shard(mlp, Mesh::shard(world));
    unit.unshard();
    for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(mlp->parameters()[i].detach(), plain->parameters()[i].detach()));
    EXPECT_TRUE(at::equal(mlp(at::ones({2, 4}, world->device())), plain(at::ones({2, 4}, world->device()))));
  });
}

// -- one rank ------------------------------------------------------------------------------------------------------------

TEST(ReduceOpWorldSize1, SingletonCopyDivision) {
  for (auto factor : {std::optional<double>{}, std::optional{1.0}, std::optional{2.0}})
    for (bool accumulates : {false, true})
      each_rank(1, [&](Rank world) {
        auto dot = filled(Dot(4, 8), *world);
        auto unit = fully_shard(dot, Mesh::shard(world));
        if (factor) unit.set_gradient_divide_factor(*factor);
        if (accumulates) {
          unit.set_requires_gradient_sync(false);
          dot(at::zeros({4, 8}, world->device())).backward();
          unit.set_requires_gradient_sync(true);
        }
        dot(at::full({4, 8}, 3.0, world->device())).backward();
        auto want = at::full({4, 8}, 3.0 / factor.value_or(1.0), world->device());
        EXPECT_TRUE(at::equal(dot->w.grad(), want)) << "factor " << factor.value_or(0) << (accumulates ? ", accumulated" : "");
      });
}

TEST(ReduceOpWorldSize1, Size1Reduceop) {
  each_rank(1, [](Rank world) {
    auto sharded = filled(Mlp(64, 65, 3), *world), plain = filled(Mlp(64, 65, 3), *world);
    fully_shard(sharded, Mesh::shard(world), {.reshard_after_forward = false});
    expect_train_parity(*world, trainee(sharded), trainee(plain), [&](int i, int) { return random_input(*world, {5, 64}, i); },
                        {.iterations = 3, .tolerance = 0});
  });
}

TEST(CountChecker, SeesAMissingAndASurplusCollective) {
  EXPECT_EQ(counts_of({"all_gather a", "reduce_scatter a"}), (WireCounts{1, 1, 0}));
  EXPECT_NE(counts_of({"all_gather a"}), (WireCounts{.all_gathers = 2}));
  EXPECT_NONFATAL_FAILURE((void)counts_of({"all_gather a", "all_to_all"}), "other collectives");
}

}  // namespace
}  // namespace fsdpp::test::suite

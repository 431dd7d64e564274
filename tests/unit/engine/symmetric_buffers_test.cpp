// Symmetric buffers: the engine asks the communicators for gathered and gradient buffers. Nothing else changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <tuple>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/adamw.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::MeshOptions;
using comm::run_local_world;
using comm::World;
using testing::HasSubstr;

constexpr MeshOptions kSymmetric{.symmetric_buffers = true};

struct Case {
  std::string name;
  FullyShardOptions options;
  int accumulate = 1;
  int replicas = 1;
  bool frozen = false, two_dtypes = false;
};

std::vector<Case> cases() {
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  return {{"fp32", {}},
          {"bf16", {.mp_policy = bf16}},
          {"bf16_kept_cast", {.mp_policy = bf16, .keep_cast_shard = true}},
          {"kept_after_forward", {.mp_policy = bf16, .reshard_after_forward = false}},
          {"accumulated", {.mp_policy = bf16}, 3},
          {"two_dtypes", {}, 1, 1, false, true},
          {"frozen_norms", {.mp_policy = bf16}, 1, 1, true},
          {"offloaded", {.offload_policy = CPUOffloadPolicy{}}},
          {"hybrid", {.mp_policy = bf16}, 1, 2},
          {"resharded_to_pairs", {.mp_policy = bf16, .reshard_after_forward = 2}}};
}

TinyNet make_net(const Case& c) {
  auto net = make_tiny_net();
  for (auto& b : net->blocks) {
    if (c.frozen) b->scale.requires_grad_(false);
    if (c.two_dtypes) b->register_parameter("extra", at::full({100}, 0.5, at::kDouble));
  }
  return net;
}

/// Bits of all losses and weights after a few steps.
std::vector<at::Tensor> train(const Case& c, const std::shared_ptr<World>& world, const MeshOptions& options) {
  const auto mesh = Mesh::hybrid(world, c.replicas, "default", options);
  auto net = make_net(c);
  shard_tiny_net(net, mesh, c.options, c.options);
  optim::AdamW optimizer(*net, {.lr = 1e-2});
  std::vector<at::Tensor> result;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < c.accumulate; ++micro) {
      unit_of(*net).set_requires_gradient_sync(micro + 1 == c.accumulate);
      const auto ids = tokens(static_cast<uint64_t>(1000 * micro + 100 * step + world->rank()));
      const auto loss = token_loss(net(ids), ids.flip(0));
      loss.backward();
      result.push_back(loss.detach().clone());
    }
    optimizer.step();
  }
  const auto formula = memory_formula(*net, c.accumulate > 1);
  if (c.options.reshard_after_forward != ReshardAfterForward(2)) {  // which the formula leaves out
    EXPECT_LE(reserved_buffer_bytes(*net), formula.gathered + formula.gradients + formula.staging) << c.name;
  }
  EXPECT_EQ(registered_buffer_bytes(*net), 0) << "not on the CPU";
  for (auto& p : net->parameters()) result.push_back(full_tensor(p));
  return result;
}

class SymmetricBuffers : public testing::TestWithParam<int> {};

TEST_P(SymmetricBuffers, AreUsedThenTrainingHasTheSameBits) {
  for (const auto& c : cases()) {
    if (GetParam() % c.replicas != 0 || (c.options.reshard_after_forward == ReshardAfterForward(2) && GetParam() % 2 != 0)) continue;
    run_local_world(GetParam(), [&](const std::shared_ptr<World>& world) {
      const auto want = train(c, world, {}), got = train(c, world, kSymmetric);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << c.name << " " << i;
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, SymmetricBuffers, testing::Values(1, 2, 3, 4));

comm::LocalWorldOptions counting_allocations(std::atomic<int>& count) {
  comm::LocalWorldOptions options;
  options.on_operation = [&count](const comm::OperationEvent& e) {
    count += e.label.starts_with("allocate ");
    return comm::Fault::None;
  };
  return options;
}

TEST(SymmetricBuffersReserved, FirstStepMadeThemThenNoneIsMadeLater) {
  std::atomic<int> allocations = 0;
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    auto net = make_tiny_net(1, /*blocks=*/5);
    shard_tiny_net(net, Mesh::shard(world, "default", kSymmetric));
    unit_of(*net).set_reduce_scatter_max_input_buffers(2);
    for (int step = 0; step < 4; ++step) {
      const auto ids = tokens(static_cast<uint64_t>(step + world->rank()));
      token_loss(net(ids), ids).backward();
      world->barrier();
      EXPECT_EQ(allocations, 2 * (2 + 1 + 2 + 1)) << "two block slots and the root's, to gather and to reduce, on 2 ranks; step " << step;
      world->barrier();
    }
  }, counting_allocations(allocations));
}

/// Two units of one size, of which a loss may use one alone.
struct ForkImpl : torch::nn::Module {
  ForkImpl() {
    left = register_module("left", TinyBlock(7, 15));
    right = register_module("right", TinyBlock(7, 15));
    fill_parameters(*this, 1);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {left(x), right(x)}; }
  TinyBlock left{nullptr}, right{nullptr};
};
FSDPP_MODULE(Fork);

// Rank 0 comes to the gradients of one unit first, rank 1 to those of the other.
TEST(SymmetricBuffersReserved, RanksUseDifferentUnitsThenBuffersAreThereForAll) {
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    Fork fork;
    const auto mesh = Mesh::shard(world, "default", kSymmetric);
    for (auto* block : {&fork->left, &fork->right})
      fully_shard(*block, mesh, {.reshard_after_forward = false}).set_reduce_scatter_unused_params(true);
    fully_shard(fork, mesh);
    for (int step = 0; step < 3; ++step) {
      const auto [a, b] = fork(at::ones({1, 7}));
      (world->rank() == 0 ? a : b).sum().backward();
      for (auto& p : fork->parameters()) EXPECT_TRUE(p.grad().defined());
    }
  });
}

TEST(SymmetricBuffersReserved, UnitsOfTwoMeshesThenBuffersOfBothAreMadeInTheFirstForward) {
  std::atomic<int> allocations = 0;
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    Fork fork;
    fully_shard(fork->left, Mesh::shard(world, "experts", kSymmetric));
    fully_shard(fork, Mesh::shard(world, "default", kSymmetric));
    (void)fork(at::ones({1, 7}));
    world->barrier();
    EXPECT_EQ(allocations, 2 * (2 + 2)) << "to gather and to reduce, by two units on two ranks";
  }, counting_allocations(allocations));
}

TEST(SymmetricBuffersReserved, OneUnitOfTheSizeStaysGatheredThenNoMoreThanTheFormula) {
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    auto net = make_tiny_net(1, /*blocks=*/5);
    const auto mesh = Mesh::shard(world, "default", kSymmetric);
    for (size_t i = 0; i < net->blocks.size(); ++i) fully_shard(net->blocks[i], mesh, {.reshard_after_forward = i != 4});
    fully_shard(net, mesh);
    const auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
    const auto formula = memory_formula(*net);
    EXPECT_EQ(reserved_buffer_bytes(*net), formula.gathered + formula.gradients);
  });
}

TEST(SymmetricBuffersReserved, MoreReduceBuffersAfterTheFirstForwardThenUsageError) {
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world, "default", kSymmetric));
    const auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
    EXPECT_NO_THROW(unit_of(*net).set_reduce_scatter_max_input_buffers(1));
    try {
      unit_of(*net).set_reduce_scatter_max_input_buffers(2);
      ADD_FAILURE() << "nobody would make them";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("before the first forward"));
    }
  });
}

TEST(SymmetricBuffersOption, DiffersBetweenRanksThenErrorNamesIt) {
  std::atomic<int> told = 0;
  run_local_world(2, [&](const std::shared_ptr<World>& world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, Mesh::shard(world, "default", {.symmetric_buffers = world->rank() == 1}));
    try {
      (void)net(tokens(1));
      ADD_FAILURE() << "ranks with different options went on";
    } catch (const UsageError& e) {
      EXPECT_THAT(e.what(), HasSubstr("symmetric buffers"));
      ++told;
    }
  });
  EXPECT_EQ(told, 2);
}

TEST(MeshEnvironment, VariablesAreSetThenTheyOverrideOptions) {
  auto options_of = [](const MeshOptions& given) {
    MeshOptions result;
    run_local_world(1, [&](const std::shared_ptr<World>& world) { result = Mesh::shard(world, "default", given)->options(); });
    return result;
  };
  EXPECT_FALSE(options_of({}).symmetric_buffers);
  EXPECT_TRUE(options_of({.copy_engine_gathers = true}).symmetric_buffers) << "copy engines need them";
  ::setenv("FSDPP_COPY_ENGINE_GATHERS", "1", 1);
  ::setenv("FSDPP_MAX_CTAS", "8", 1);
  const auto all = options_of({});
  EXPECT_TRUE(all.copy_engine_gathers && all.symmetric_buffers);
  EXPECT_EQ(all.max_ctas, 8);
  ::setenv("FSDPP_COPY_ENGINE_GATHERS", "0", 1);
  ::setenv("FSDPP_SYMMETRIC_BUFFERS", "off", 1);
  EXPECT_FALSE(options_of({.symmetric_buffers = true, .copy_engine_gathers = true}).symmetric_buffers);
  ::setenv("FSDPP_MAX_CTAS", "many", 1);
  EXPECT_THROW(options_of({}), ConfigError);
  for (const char* name : {"FSDPP_COPY_ENGINE_GATHERS", "FSDPP_SYMMETRIC_BUFFERS", "FSDPP_MAX_CTAS"}) ::unsetenv(name);
}

}  // namespace
}  // namespace fsdpp::test

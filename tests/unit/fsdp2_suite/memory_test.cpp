// After test_fully_shard_memory.py, and of Megatron-FSDP v2: deleted_model_releases_fsdp_storage, returns_to_resting_memory,
// training_step_peak_memory_bounds_full_size_buffers. Every byte of the device's allocator is counted. The bounds are FSDP2's, in fp32
// bytes on two ranks: S shards, U whole model, B the largest block, N what is in no block; and the library's own formula.
#include <torch/optim/adam.h>

#include "support/byte_count.h"
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

TEST(ByteCounter, SeesAllocationsAndTheirEnd) {
  ByteCount bytes(c10::kCPU);
  {
    auto a = at::empty({1 << 16});
    EXPECT_EQ(bytes.now(), 4 << 16);
  }
  EXPECT_EQ(bytes.now(), 0);
  EXPECT_EQ(bytes.take_peak(), 4 << 16);
  EXPECT_EQ(bytes.take_peak(), 0);
  EXPECT_EQ(bytes.take_allocations(), 1);
}

// -- the model -----------------------------------------------------------------------------------------------------------

constexpr int64_t kVocab = 32, kDim = 128, kLayers = 3;

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    embed = register_module("embed", torch::nn::Embedding(kVocab, kDim));
    head = register_module("head", torch::nn::Linear(kDim, kVocab));
  }
  void add(Mlp mlp) { mlps.push_back(register_module("layer" + std::to_string(mlps.size()), std::move(mlp))); }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = embed(ids);
    for (auto& m : mlps) x = m(x);
    return head(x);
  }
  torch::nn::Embedding embed{nullptr};
  std::vector<Mlp> mlps;
  torch::nn::Linear head{nullptr};
};
FSDPP_MODULE(Layers);

int64_t bytes_of(const torch::nn::Module& module) {
  int64_t sum = 0;
  for (auto& p : module.parameters()) sum += static_cast<int64_t>(p.nbytes());
  return sum;
}

struct Sizes {
  int64_t shards = 0, whole = 0, block = 0, rest = 0;
};
Sizes sizes_of(int ranks) {
  Sizes s;
  s.block = bytes_of(*Mlp(kDim));
  s.rest = bytes_of(*Layers());
  s.whole = kLayers * s.block + s.rest;
  s.shards = s.whole / ranks;
  return s;
}
constexpr int64_t kActivations = 96 << 10;  // inputs of 4 tokens, and padding: well below a block's half megabyte

at::Tensor ids_on(const World& world) { return tokens(world.rank(), kVocab, 1, 4).to(world.device()); }

/// Each block is built, and sharded, before the next one exists.
Layers build_sharded(const Rank& world, const std::shared_ptr<Mesh>& mesh, Reshard reshard) {
  FullyShardOptions options{.reshard_after_forward = reshard};
  Layers net;
  net->to(world->device());
  for (int i = 0; i < kLayers; ++i) {
    net->add(Mlp(kDim));
    net->mlps.back()->to(world->device());
    fully_shard(net->mlps.back(), mesh, options);
  }
  fully_shard(net, mesh, options);
  return net;
}

// -- peaks ---------------------------------------------------------------------------------------------------------------

class TrainingMemory : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(ReshardAfterForward, TrainingMemory, ::testing::Bool());

TEST_P(TrainingMemory, FullyShardTrainingMemory) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    const auto s = sizes_of(2);
    const bool reshards = GetParam();
    ByteCount bytes(world->device());
    auto net = build_sharded(world, mesh, reshards);
    EXPECT_LE(bytes.take_peak(), s.shards + s.block + kActivations) << "init";
    EXPECT_LE(bytes.now(), s.shards + kActivations) << "after init";
    const auto formula = memory_formula(*net);
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(1e-2));
    int64_t resting = 0;
    for (int step = 0; step < 3; ++step) {
      const int64_t states = step == 0 ? 0 : 2 * s.shards;
      auto loss = net(ids_on(*world)).sum();
      const int64_t forward = bytes.take_peak() - states;
      if (step == 0) {
        EXPECT_LE(forward, reshards ? s.shards + 3 * s.block + s.rest + kActivations : s.shards + s.whole + s.block + kActivations) << "forward";
      }
      EXPECT_LE(forward, formula.shards + formula.gathered + (step ? formula.gradients : 0) + kActivations) << "forward by the formula";
      loss.backward();
      loss = at::Tensor();
      const int64_t backward = bytes.take_peak() - states;
      // Above FSDP2's S + U + 1.5 B without resharding, by design: slots stay reserved while a backward no longer needs them.
      if (step == 0 && reshards) {
        EXPECT_LE(backward, 2 * s.shards + 3 * s.block + s.rest + kActivations + s.block) << "backward";
      }
      // A block's unsharded gradients come on top.
      EXPECT_LE(backward, formula.total() + kActivations + s.block) << "backward by the formula";
      EXPECT_GE(backward, formula.total() * 95 / 100) << "the formula is not what happens";
      adam.step();
      adam.zero_grad();
      (void)bytes.take_peak();
      const int64_t rests = bytes.now() - 2 * s.shards;
      EXPECT_LE(rests, formula.shards + reserved_buffer_bytes(*net) + kActivations) << "after zero_grad";
      EXPECT_EQ(rests, step == 0 ? rests : resting) << "returns to resting memory";
      resting = rests;
    }
  });
}

TEST(TrainingStep, PeakMemoryBoundsFullSizeBuffers) {
  each_rank(2, [](Rank world) {
    auto net = build_sharded(world, Mesh::shard(world), true);
    for (int step = 0; step < 3; ++step) net(ids_on(*world)).sum().backward();
    const auto s = sizes_of(2);
    // Never the whole model: two blocks are gathered, and one is reduced, at a time.
    EXPECT_LE(reserved_buffer_bytes(*net), 3 * s.block + 2 * s.rest + kActivations);
    EXPECT_LT(reserved_buffer_bytes(*net), 2 * s.whole - 2 * s.block);
  });
}

TEST(TrainingStep, InASteadyStateNoBufferIsAllocated) {
  for (bool reshard : {false, true})
    each_rank(2, [&](Rank world) {
      auto net = build_sharded(world, Mesh::shard(world), reshard);
      ByteCount bytes(world->device());
      std::vector<int64_t> allocations;
      for (int step = 0; step < 4; ++step) {
        net(ids_on(*world)).sum().backward();
        allocations.push_back(bytes.take_allocations());
      }
      // Two weight gradients of each block by autograd; the sharded gradients are added to.
      EXPECT_EQ(allocations[2], 2 * kLayers);
      EXPECT_EQ(allocations[3], 2 * kLayers);
      EXPECT_GT(allocations[0], allocations[3]);
    });
}

// -- of Megatron-FSDP v2 -------------------------------------------------------------------------------------------------

TEST(Ownership, DeletedModelReleasesFsdpStorage) {
  for (int ranks : {1, 2})
    each_rank(ranks, [](Rank world) {
      auto mesh = Mesh::shard(world);
      ByteCount bytes(world->device());
      for (bool with_loss : {false, true}) {
        auto net = build_sharded(world, mesh, true);
        auto loss = net(ids_on(*world)).sum();
        loss.backward();
        auto unit = unit_of(*net->mlps[0]);
        EXPECT_GT(bytes.now(), sizes_of(world->size()).shards);
        if (with_loss) loss = net(ids_on(*world)).sum();  // a graph that nobody went through
        net = Layers(nullptr);
        loss = at::Tensor();
        EXPECT_THROW((void)unit.stats(), UsageError);
        EXPECT_LE(bytes.now(), 1024) << "with_loss " << with_loss;
      }
    });
}

// A copy of one handle keeps that unit's shard, and nothing of the others.
TEST(Ownership, ACopyOfAHandleKeepsItsUnitOnly) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    ByteCount bytes(world->device());
    auto net = build_sharded(world, mesh, true);
    net(ids_on(*world)).sum().backward();
    auto kept = net->mlps[1]->in_proj->weight;
    auto unit = unit_of(*net->mlps[1]), other = unit_of(*net->mlps[0]);
    net = Layers(nullptr);
    EXPECT_EQ(unit.parameters().size(), 4u);
    EXPECT_THROW((void)other.stats(), UsageError);
    EXPECT_TRUE(kept.grad().defined());
    kept = at::Tensor();
    EXPECT_THROW((void)unit.stats(), UsageError);
    EXPECT_LE(bytes.now(), 1024);
  });
}

TEST(MemoryFormulas, ReservedBuffersStayWithinThePrintedFormula) {
  for (int ranks : {1, 2, 3})
    for (bool accumulates : {false, true})
      each_rank(ranks, [&](Rank world) {
        auto net = filled(TinyNet(23, 7, 6), *world);
        FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
        shard_tiny_net(net, Mesh::shard(world), options, options);
        auto formula = memory_formula(*net, accumulates);
        int64_t after_second_step = 0;
        for (int step = 0; step < 4; ++step) {
          unit_of(*net).set_requires_gradient_sync(!accumulates || step % 2 == 1);
          auto ids = tokens(world->rank() + step).to(world->device());
          token_loss(net(ids), ids).backward();
          if (step == 1) after_second_step = reserved_buffer_bytes(*net);
        }
        EXPECT_GT(after_second_step, 0);
        EXPECT_LE(after_second_step, formula.gathered + formula.gradients);
        EXPECT_EQ(reserved_buffer_bytes(*net), after_second_step) << "a steady state allocates nothing";
        EXPECT_LT(formula.gathered, 7 * unit_of(*net->blocks[0]).memory().gathered_bytes) << "the formula must be less than the whole model";
      });
}

}  // namespace
}  // namespace fsdpp::test::suite

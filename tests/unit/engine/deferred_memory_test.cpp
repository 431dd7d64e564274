// No rank ever holds more than its shards and one block; weights that only rank 0 has.
#include <c10/core/CPUAllocator.h>
#include <torch/nn/init.h>

#include <atomic>

#include "fsdpp/checkpoint/full_state.h"
#include "unit/engine/deferred_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

// Counts what LibTorch allocates on the CPU.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto held = live += static_cast<int64_t>(bytes);
    total += static_cast<int64_t>(bytes);
    raise(peak, held);
    raise(largest, static_cast<int64_t>(bytes));
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    auto* block = static_cast<Block*>(::operator new(sizeof(Block) + bytes, std::align_val_t(alignof(Block))));
    *block = {this, static_cast<int64_t>(bytes)};
    return {block + 1, block + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dst, const void* src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
  std::atomic<int64_t> live{0}, peak{0}, largest{0}, total{0};

 private:
  struct alignas(64) Block {  // before the memory itself
    CountingAllocator* owner;
    int64_t bytes;
  };
  static void free_block(void* data) {
    if (!data) return;
    auto* block = static_cast<Block*>(data) - 1;
    block->owner->live -= block->bytes;
    ::operator delete(block, std::align_val_t(alignof(Block)));
  }
  static void raise(std::atomic<int64_t>& mark, int64_t value) {
    for (auto seen = mark.load(); seen < value && !mark.compare_exchange_weak(seen, value);) {
    }
  }
};

class CountAllocations {
 public:
  CountAllocations() { c10::SetCPUAllocator(&counter, 100); }
  ~CountAllocations() { c10::SetCPUAllocator(before_, 100); }
  CountingAllocator counter;

 private:
  c10::Allocator* before_ = c10::GetCPUAllocator();
};

CountingAllocator& allocations() {
  static CountAllocations* count = new CountAllocations;  // tensors of the process may outlive the test
  return count->counter;
}

TEST(DeferredMemory, NoMoreThanTheShardsIsEverAllocated) {
  auto& counter = allocations();
  (void)at::zeros({1000});
  EXPECT_GE(counter.largest, 4000) << "the counter sees allocations";
  counter.largest = 0, counter.peak = counter.live.load();
  const auto start = counter.live.load();
  run_local_world(4, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto make = [&] {
      const DeferredInit guard;
      auto block = std::make_shared<torch::nn::LinearImpl>(1024, 1024);
      torch::nn::init::kaiming_normal_(block->weight);
      return block;
    };
    auto block = make();
    fully_shard(block, mesh);
    world->barrier();
    if (world->rank() == 0) {
      EXPECT_LT(counter.live - start, 1 << 16) << "sharded, and nothing allocated";
    }
    world->barrier();
    materialize(*block);
    world->barrier();
    const int64_t whole = 1024 * 1025 * 4;
    if (world->rank() == 0) {
      EXPECT_LE(counter.largest, whole / 4 + (1 << 16)) << "no rank ever held the whole parameter";
      EXPECT_LE(counter.peak - start, whole + (1 << 18));
      EXPECT_GE(counter.peak - start, whole);
    }
    world->barrier();
  });
}

TEST(DeferredMemory, ModelOfManyGigabytesIsBuiltAndShardedWithoutMemory) {
  struct Big : torch::nn::Module {
    Big() {
      for (int i = 0; i < 100; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8192, 8192)));
    }
    std::vector<torch::nn::Linear> layers;
  };
  auto& counter = allocations();
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    world->barrier();
    const auto before = counter.total.load();
    world->barrier();
    auto big = deferred([] { return std::make_shared<Big>(); });
    for (auto& layer : big->layers) fully_shard(layer, mesh);
    auto root = fully_shard(big, mesh);
    world->barrier();
    EXPECT_LT(counter.total - before, 1 << 16) << "of both ranks together, freed or not";
    int64_t shards = 0;
    for (auto& unit : units(*big)) shards += unit.memory().shard_bytes;
    EXPECT_GE(shards, int64_t{100} * 8192 * 8193 * 4 / 2) << "13 GB on each rank, were it materialised";
    world->barrier();
  });
}

// -- weights from rank 0 -------------------------------------------------------------------------------------------------

class FromRank0 : public ::testing::TestWithParam<std::pair<int, int>> {  // ranks, replicas
 protected:
  static void each_rank(const std::function<void(std::shared_ptr<Mesh>)>& body) {
    const auto [size, replicas] = GetParam();
    run_local_world(size, [&, replicas = replicas](std::shared_ptr<World> world) { body(Mesh::hybrid(world, replicas)); });
  }
};

TEST_P(FromRank0, LoadGivesEveryRankItsRows) {
  const auto full = state_of(*make_tiny_net(9));
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    auto net = late_net();
    shard_tiny_net(net, mesh);
    materialize(*net, {.fill = false});
    std::vector<std::string> asked;
    load_from_rank0(*net, [&](const std::string& name) {
      asked.push_back(name);
      return full.at(name).to(at::kDouble);
    });
    EXPECT_EQ(asked.size(), mesh->world().rank() == 0 ? full.size() : 0);
    expect_same(state_of(*net), full, "");
  });
}

TEST_P(FromRank0, SourceThatFailsFailsEveryRank) {
  const auto full = state_of(*make_tiny_net(9));
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    auto net = late_net();
    shard_tiny_net(net, mesh);
    materialize(*net, {.fill = false});
    const bool first = mesh->world().rank() == 0;
    const auto message = message_of<std::exception>([&] {
      load_from_rank0(*net, [&](const std::string& name) { return name == "head.weight" ? at::zeros({2}) : full.at(name); });
    });
    EXPECT_NE(message.find(first ? "'head.weight' has shape [23, 7], the source gave [2]" : "rank 0 could not give 'head.weight'"), message.npos) << message;
    load_from_rank0(*net, [&](const std::string& name) { return full.at(name); });
    expect_same(state_of(*net), full, "");
  });
}

TEST_P(FromRank0, SyncWhereOnlyRank0HasTheModule) {
  const auto full = state_of(*make_tiny_net(9));
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    auto net = mesh->world().rank() == 0 ? make_tiny_net(9) : late_net();
    shard_tiny_net(net, mesh, {.sync_from_rank0 = true}, {.sync_from_rank0 = true});
    materialize(*net);  // nothing is left to do
    expect_same(state_of(*net), full, "");
    const auto ids = tokens(1);
    token_loss(net(ids), ids).backward();
  });
}

TEST_P(FromRank0, SyncOfWhatRank0LacksIsAnErrorOnEveryRank) {
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    const int last = mesh->world().size() - 1;
    if (last == 0) return;
    for (const bool asked : {true, false}) {
      if (!asked && mesh->replicate_size() == 1) continue;  // nothing is synchronised
      auto net = mesh->world().rank() == last ? make_tiny_net(9) : late_net();
      FullyShardOptions options;
      if (asked) options.sync_from_rank0 = true;
      const auto message = message_of<UsageError>([&] { fully_shard(net->blocks[0], mesh, options); });
      EXPECT_NE(message.find("is on the meta device on rank 0, but not on every rank"), message.npos) << message;
      EXPECT_NE(message.find("'scale'"), message.npos) << message;
      EXPECT_EQ(net->blocks[0]->up->weight.is_meta(), mesh->world().rank() != last) << "nothing is changed";
    }
  });
}

TEST_P(FromRank0, SyncWhereNoRankHasTheModuleLeavesItToMaterialize) {
  auto plain = late_net();
  materialize(*plain, {.seed = 4});
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    auto net = late_net();
    shard_tiny_net(net, mesh, {.sync_from_rank0 = true}, {.sync_from_rank0 = true});
    EXPECT_TRUE(net->head->weight.is_meta());
    materialize(*net, {.seed = 4});
    expect_same(state_of(*net), state_of(*plain), "");
  });
}

TEST_P(FromRank0, FileIsLoadedOntoMemoryOnlyShards) {
  const auto path = testing::TempDir() + "/deferred_memory_test.safetensors";
  auto plain = make_tiny_net(9);
  dcp::save_full(*plain, path);
  each_rank([&](std::shared_ptr<Mesh> mesh) {
    auto net = late_net();
    shard_tiny_net(net, mesh);
    const auto message = message_of<UsageError>([&] { (void)dcp::load_full(*net, path); });
    EXPECT_NE(message.find("has no memory yet"), message.npos) << message;
    materialize(*net, {.fill = false});
    dcp::load_full(*net, path);
    expect_same(state_of(*net), state_of(*plain), "");
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, FromRank0, ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(4, 2), std::pair(2, 2)));

TEST(DeferredMemory, LoadBeforeMaterialisationSaysWhatToDo) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto net = late_net();
    shard_tiny_net(net, Mesh::shard(world));
    const auto message = message_of<UsageError>([&] { load_from_rank0(*net, [](const std::string&) { return at::Tensor(); }); });
    EXPECT_NE(message.find("'embed.weight' has no memory yet"), message.npos) << message;
    EXPECT_NE(message.find("materialize(module, {.fill = false})"), message.npos) << message;
  });
}

}  // namespace
}  // namespace fsdpp::test

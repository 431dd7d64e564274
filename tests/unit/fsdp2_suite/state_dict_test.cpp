// After test_fully_shard_state_dict.py: the full state is written and read on every mesh, moves between meshes, and training goes on as if
// nothing had happened.
#include <torch/optim/adam.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

namespace state = fsdpp::dcp;
namespace fs = std::filesystem;

struct MeshShape {
  int ranks = 1, replicas = 1;
};

/// A file of this process, gone at the end.
class StateDict : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  [[nodiscard]] std::string path(const std::string& name) const { return (folder_ / name).string(); }
  fs::path folder_ = fs::temp_directory_path() / ("fsdpp_suite_state_" + std::to_string(::getpid()));
};

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// Sizes that no number of ranks divides; the last parameters are in the root unit.
MlpStack sharded_stack(const Rank& world, const MeshShape& shape, uint64_t seed, Reshard reshard = {}) {
  auto mesh = Mesh::hybrid(world, shape.replicas);
  auto stack = filled(MlpStack(7, 3), *world, seed);
  for (size_t i = 0; i < 2; ++i) fully_shard(stack->mlps[i], mesh, {.reshard_after_forward = reshard});
  fully_shard(stack, mesh, {.reshard_after_forward = reshard});
  return stack;
}

const std::vector<MeshShape> kMeshes{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {4, 2}, {2, 2}};

TEST_F(StateDict, DpStateDictSaveLoad) {
  each_rank(1, [&](Rank world) { state::save_full(*filled(MlpStack(7, 3), *world, 1), path("plain")); });
  const auto want = content(path("plain"));
  for (auto& shape : kMeshes)
    for (Reshard reshard : {Reshard{true}, Reshard{false}})
      each_rank(shape.ranks, [&](Rank world) {
        auto stack = sharded_stack(world, shape, 1, reshard);
        (void)stack(random_input(*world, {2, 7}, 1));  // without resharding: saved while gathered
        state::save_full(*stack, path("sharded"));
        world->barrier();
        EXPECT_EQ(content(path("sharded")), want);
        world->barrier();
        auto other = sharded_stack(world, shape, 2, reshard);
        (void)other(random_input(*world, {2, 7}, 1));
        auto result = state::load_full(*other, path("plain"));
        EXPECT_TRUE(result.missing.empty() && result.unexpected.empty());
        auto x = random_input(*world, {2, 7}, 3);
        EXPECT_TRUE(at::equal(other(x), stack(x)));
        expect_same_parameters(*other, *filled(MlpStack(7, 3), *world, 1), 0.0);
      });
}

// Trained on one mesh, saved, loaded on every other one: the same weights, and the next step is the same.
TEST_F(StateDict, SavedOnOneMeshLoadsOnAnother) {
  auto train = [](MlpStack& stack, const Rank& world, int first, int steps) {
    torch::optim::Adam adam(stack->parameters(), torch::optim::AdamOptions(1e-2).eps(1e-3));
    for (int i = first; i < first + steps; ++i) {
      adam.zero_grad();
      stack(random_input(*world, {2, 7}, i)).sum().backward();  // all ranks the same batch: the mean is that of one
      adam.step();
    }
  };
  for (auto& from : kMeshes)
    each_rank(from.ranks, [&](Rank world) {
      auto stack = sharded_stack(world, from, 1);
      train(stack, world, 0, 2);
      state::save_full(*stack, path(std::to_string(from.ranks) + "x" + std::to_string(from.replicas)));
    });
  for (auto& from : kMeshes)
    for (auto& to : kMeshes)
      each_rank(to.ranks, [&](Rank world) {
        auto stack = sharded_stack(world, to, 5), plain = filled(MlpStack(7, 3), *world, 6);
        SCOPED_TRACE(std::to_string(from.ranks) + "x" + std::to_string(from.replicas) + " to " + std::to_string(to.ranks) + "x" + std::to_string(to.replicas));
        auto file = path(std::to_string(from.ranks) + "x" + std::to_string(from.replicas));
        state::load_full(*stack, file);
        state::load_full(*plain, file);
        expect_same_parameters(*stack, *plain, 0.0);
        train(stack, world, 2, 1), train(plain, world, 2, 1);
        expect_same_parameters(*stack, *plain, 1e-5);
      });
}

// Only the rank that writes sees whole tensors, one at a time.
TEST_F(StateDict, Rank0OffloadFullStateDict) {
  each_rank(2, [&](Rank world) {
    auto stack = sharded_stack(world, {2, 1}, 1);
    EventLog log(EventLog::What::Units, *world);
    state::save_full(*stack, path("full"));
    EXPECT_THAT(log.take(), ::testing::IsEmpty()) << "no unit was gathered";
    for (auto& u : units(*stack)) EXPECT_TRUE(u.is_sharded());
    expect_handles_show_shards(*stack);
  });
}

// Rank 0 writes for all replicas: each rank learns of its failure, and none returns before the file is there.
TEST_F(StateDict, EveryReplicaWaitsForTheFileAndLearnsOfAFailure) {
  each_rank(4, [&](Rank world) {
    auto stack = sharded_stack(world, {4, 2}, 1);
    EXPECT_THROW(state::save_full(*stack, path("no/such/folder/file")), CheckpointError) << "rank " << world->rank();
    state::save_full(*stack, path("full"));
    EXPECT_TRUE(fs::exists(path("full"))) << "rank " << world->rank();
  });
}

TEST_F(StateDict, CheckerSeesOneWrongWeight) {
  each_rank(2, [&](Rank world) {
    auto stack = sharded_stack(world, {2, 1}, 1), same = sharded_stack(world, {2, 1}, 1);
    {
      at::NoGradGuard no_grad;
      if (world->rank() == 1) same->mlps[2]->out_proj->bias.add_(1e-3);
    }
    state::save_full(*stack, path("a"));
    state::save_full(*same, path("b"));
    world->barrier();
    EXPECT_NE(content(path("a")), content(path("b")));
  });
}

}  // namespace
}  // namespace fsdpp::test::suite

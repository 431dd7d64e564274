// After test_fully_shard_clip_grad_norm_.py: the norm and the clipped gradients are those of the unsharded model, for one all-reduce a mesh.
#include <torch/nn/utils/clip_grad.h>

#include <limits>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

using ::testing::ElementsAre;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Gradients of two models of one shape: `sharded` by this rank's batch, `plain` by everybody's.
template <class Holder>
void backward_both(Holder& sharded, Holder& plain, const World& world, int step) {
  auto batch = [&](int r) { return random_input(world, {3, 8}, 10 * step + r) * (step + 1); };
  sharded(batch(world.rank())).sum().backward();
  for (int r = 0; r < world.size(); ++r) (plain(batch(r)).sum() / world.size()).backward();
}

template <class Module>
void drop_gradients(const Module& module) {
  for (auto& p : module.parameters()) p.mutable_grad() = at::Tensor();
}

/// Compares clipping by `max_norm` on both, with exactly `all_reduces` (by communicator) on the wire.
template <class Holder>
void expect_clips_alike(Holder& sharded, Holder& plain, const World& world, double max_norm, double p, size_t all_reduces) {
  EventLog log(EventLog::What::Collectives, world);
  double norm = optim::clip_grad_norm_(*sharded, max_norm, p);
  auto wire = log.take();
  EXPECT_EQ(wire.size(), all_reduces);
  EXPECT_EQ(count_events(wire, "all_reduce"), static_cast<int64_t>(all_reduces));
  double want = torch::nn::utils::clip_grad_norm_(plain->parameters(), max_norm, p);
  EXPECT_NEAR(norm, want, 1e-5 * want) << "p " << p;
  expect_same_parameters(*sharded, *plain, 1e-5, 1e-5);
}

template <class Holder>
void train_and_clip(Holder sharded, Holder plain, const World& world, std::initializer_list<double> orders, size_t all_reduces) {
  int step = 0;
  for (double p : orders)
    for (double max_norm : {0.1, 1e6}) {
      drop_gradients(*sharded), drop_gradients(*plain);
      backward_both(sharded, plain, world, step++);
      expect_clips_alike(sharded, plain, world, max_norm, p, all_reduces);
    }
}

TEST(ClipGradNormWorldSize2, ClipGradNorm1d) {
  each_rank(2, [](Rank world) {
    auto mesh = Mesh::shard(world);
    auto sharded = filled(MlpStack(8, 3), *world), plain = filled(MlpStack(8, 3), *world);
    for (auto& m : sharded->mlps) fully_shard(m, mesh);
    fully_shard(sharded, mesh);
    train_and_clip(sharded, plain, *world, {2.0, 1.0, 3.0, kInfinity}, 1);
  });
}

// The replicas hold the same gradients: nothing is asked of them.
TEST(ClipGradNormWorldSize4, ClipGradNorm2d) {
  for (int replicas : {2, 4})
    each_rank(4, [&](Rank world) {
      auto mesh = Mesh::hybrid(world, replicas);
      auto sharded = filled(MlpStack(8, 3), *world), plain = filled(MlpStack(8, 3), *world);
      for (auto& m : sharded->mlps) fully_shard(m, mesh);
      fully_shard(sharded, mesh);
      train_and_clip(sharded, plain, *world, {2.0, 1.0, 3.0, kInfinity}, mesh->shard_size() > 1 ? 1 : 0);
    });
}

// PyTorch fails here (its issue 180346): some units on one mesh, some on another, some parameters on none.
TEST(ClipGradNormWorldSize4, MixedMeshesAndUnshardedParameters) {
  each_rank(4, [](Rank world) {
    auto flat = Mesh::shard(world, "flat"), hybrid = Mesh::hybrid(world, 2, "hybrid");
    auto sharded = filled(MlpStack(8, 3), *world), plain = filled(MlpStack(8, 3), *world);
    fully_shard(sharded->mlps[0], flat);
    fully_shard(sharded->mlps[1], hybrid);
    int step = 0;
    for (double p : {2.0, 1.0, 3.0, kInfinity}) {
      drop_gradients(*sharded), drop_gradients(*plain);
      backward_both(sharded, plain, *world, step++);
      auto theirs = plain->mlps[2]->parameters(), ours = sharded->mlps[2]->parameters();
      for (size_t i = 0; i < ours.size(); ++i) ours[i].mutable_grad() = theirs[i].grad().clone();  // as a data-parallel wrapper would
      EventLog log(EventLog::What::Collectives, *world);
      double norm = optim::clip_grad_norm_(*sharded, 0.1, p);
      EXPECT_EQ(log.take().size(), 2u) << "one a mesh";
      double want = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1, p);
      EXPECT_NEAR(norm, want, 1e-5 * want) << "p " << p;
      expect_same_parameters(*sharded->mlps[0], *plain->mlps[0], 1e-5, 1e-5);
      expect_same_parameters(*sharded->mlps[1], *plain->mlps[1], 1e-5, 1e-5);
      for (size_t i = 0; i < ours.size(); ++i) EXPECT_LT(relative_error(ours[i].grad(), theirs[i].grad()), 1e-5);
    }
  });
}

TEST(ClipGradNormWorldSize1, NothingOnTheWire) {
  each_rank(1, [](Rank world) {
    auto sharded = filled(MlpStack(8, 2), *world), plain = filled(MlpStack(8, 2), *world);
    fully_shard(sharded, Mesh::shard(world));
    train_and_clip(sharded, plain, *world, {2.0, kInfinity}, 0);
  });
}

}  // namespace
}  // namespace fsdpp::test::suite

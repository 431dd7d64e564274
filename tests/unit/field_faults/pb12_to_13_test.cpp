// PB-12 and PB-13: accumulation with the switch of synchronisation in several places; embeddings with sparse gradients.
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include "unit/field_faults/wires.h"

namespace fsdpp::test {
namespace {

// -- PB-12: accumulation ---------------------------------------------------------------------------------------------

/// Where synchronisation is switched off for the first three of four microbatches.
enum class Sync { Always, OffBeforeForward, OffBetweenForwardAndBackward, OffThenAnEmptyMicrobatch };

void run_microbatches(Sum& model, const UnitHandle& unit, Sync sync, int rank) {
  for (int k = 0; k < 4; ++k) {
    const bool last = k == 3;
    const bool on = sync == Sync::Always || (last && sync != Sync::OffThenAnEmptyMicrobatch);
    if (sync != Sync::OffBetweenForwardAndBackward) unit.set_requires_gradient_sync(on);
    auto loss = model() * ((k + 1.0) * (rank + 1)) / 4;
    if (sync == Sync::OffBetweenForwardAndBackward) unit.set_requires_gradient_sync(on);
    loss.backward();
  }
  if (sync != Sync::OffThenAnEmptyMicrobatch) return;
  unit.set_requires_gradient_sync(true);
  (model() * 0).backward();
}

class Accumulation : public ::testing::TestWithParam<std::tuple<int, Sync>> {};

TEST_P(Accumulation, PB12_GivesTheWholeGradientWithOneReductionPerSyncedBackward) {
  const auto [ranks, sync] = GetParam();
  const int reductions = sync == Sync::Always ? 4 : 1;
  const double gradient = ranks == 2 ? 3.75 : 2.5;
  std::atomic<int> on_wire{0};
  each_rank(
      ranks,
      [&](std::shared_ptr<World> world) {
        Sum model(at::ones({4}));
        auto unit = fully_shard(model, Mesh::shard(world));
        torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
        for (int step = 1; step <= 2; ++step) {  // the second shows that accumulation starts from zero again
          unit.reset_stats();
          run_microbatches(model, unit, sync, world->rank());
          EXPECT_TRUE(nothing_unsharded(*model));
          EXPECT_TRUE(all_equal(full_grad(model->w), gradient)) << "step " << step;
          EXPECT_EQ(unit.stats().reduces, reductions);
          sgd.step();
          EXPECT_TRUE(all_near(full_tensor(model->w), 1 - 0.1 * gradient * step));
          EXPECT_TRUE(ranks != 2 || step != 1 || all_equal(full_tensor(model->w), 0.625));
          sgd.zero_grad();
        }
      },
      count_operations("reduce_scatter", on_wire));
  EXPECT_EQ(on_wire, ranks == 1 ? 0 : 2 * ranks * reductions);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation,
                         ::testing::Combine(::testing::Values(2, 1), ::testing::Values(Sync::Always, Sync::OffBeforeForward,
                                                                                       Sync::OffBetweenForwardAndBackward,
                                                                                       Sync::OffThenAnEmptyMicrobatch)));

// -- PB-13: sparse gradients and a padding row -----------------------------------------------------------------------

class PaddedEmbedding : public ::testing::TestWithParam<std::tuple<int, bool, Wire>> {};

TEST_P(PaddedEmbedding, PB13_MovesOnlyTheRowThatWasUsed) {
  const auto [ranks, sparse, wire] = GetParam();
  each_rank_on(wire, ranks, [&](std::shared_ptr<World> world) {
    auto options = torch::nn::EmbeddingOptions(6, 2).padding_idx(0).sparse(sparse)._weight(at::ones({6, 2}));
    Hooked<torch::nn::Embedding> table(options);
    fully_shard(table, Mesh::shard(world));
    torch::optim::SGD sgd(table->parameters(), torch::optim::SGDOptions(0.1));
    const auto ids = world->rank() == 0 ? at::tensor({0, 3, 3}, at::kLong) : at::tensor({0, 0, 0}, at::kLong);
    auto expected = at::ones({6, 2});
    for (int step = 1; step <= 2; ++step) {
      sgd.zero_grad();
      table(ids).sum().backward();
      EXPECT_TRUE(nothing_unsharded(*table));
      auto gradient = at::zeros({6, 2});
      gradient[3].fill_(2.0 / ranks);
      EXPECT_TRUE(same_values(full_grad(table->weight), gradient));
      sgd.step();
      const auto full = full_tensor(table->weight);
      EXPECT_TRUE(all_near(full[3], 1 - 0.2 / ranks * step));  // 0.9 after step 1 on two ranks
      for (int64_t row : {0, 1, 2, 4, 5}) EXPECT_TRUE(all_equal(full[row], 1)) << "row " << row;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PaddedEmbedding,
                         ::testing::Combine(::testing::Values(2, 1), ::testing::Bool(),
                                            ::testing::Values(Wire::InProcess, Wire::Sockets)));

}  // namespace
}  // namespace fsdpp::test

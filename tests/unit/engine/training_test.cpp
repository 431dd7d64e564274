// Sharded training against plain training of the same model on the union of the ranks' batches.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

struct Trained {
  std::vector<double> losses;        // mean over ranks, per step
  std::vector<at::Tensor> weights;   // full, in parameters() order
};

Trained train_plain(int world, int steps, double lr) {
  auto net = make_tiny_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(lr));
  Trained result;
  for (int s = 0; s < steps; ++s) {
    optimizer.zero_grad();
    at::Tensor loss;
    for (int r = 0; r < world; ++r) {
      auto ids = tokens(100 * s + r);
      auto part = token_loss(net(ids), ids.flip(0)) / world;
      loss = loss.defined() ? loss + part : part;
    }
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (auto& p : net->parameters()) result.weights.push_back(p.detach().clone());
  return result;
}

struct Setting {
  int world = 1;
  FullyShardOptions block, root;
  bool optimizer_before = false;
  comm::LocalWorldOptions world_options;
};

Trained train_sharded(const Setting& setting, int steps, double lr) {
  Trained result;
  std::mutex mutex;
  std::vector<std::vector<double>> losses(setting.world);
  run_local_world(setting.world, [&](std::shared_ptr<World> world) {
    ASSERT_EQ(world->size(), setting.world);
    auto mesh = Mesh::shard(world);
    auto net = make_tiny_net();
    std::unique_ptr<torch::optim::AdamW> optimizer;
    auto build = [&] { optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(lr)); };
    if (setting.optimizer_before) build();
    shard_tiny_net(net, mesh, setting.block, setting.root);
    if (!setting.optimizer_before) build();
    for (int s = 0; s < steps; ++s) {
      optimizer->zero_grad();
      auto ids = tokens(100 * s + world->rank());
      auto loss = token_loss(net(ids), ids.flip(0));
      loss.backward();
      optimizer->step();
      losses[world->rank()].push_back(loss.item<double>());
      for (auto& u : units(*net)) EXPECT_TRUE(u.is_sharded());
    }
    std::vector<at::Tensor> full;
    for (auto& p : net->parameters()) full.push_back(full_tensor(p));
    std::lock_guard lock(mutex);
    if (world->rank() == 0) result.weights = full;
  }, setting.world_options);
  for (int s = 0; s < steps; ++s) {
    double mean = 0;
    for (auto& l : losses) mean += l[s] / setting.world;
    result.losses.push_back(mean);
  }
  return result;
}

void expect_close(const Trained& got, const Trained& want, double tolerance) {
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t s = 0; s < want.losses.size(); ++s) EXPECT_NEAR(got.losses[s], want.losses[s], tolerance * want.losses[s]) << "step " << s;
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (size_t i = 0; i < want.weights.size(); ++i) EXPECT_LT(relative_error(got.weights[i], want.weights[i]), tolerance) << "parameter " << i;
}

class Training : public ::testing::TestWithParam<int> {};

TEST_P(Training, OptimizerBuiltBeforeShardingTrainsAsWell) {
  Setting setting{.world = GetParam(), .optimizer_before = true};
  expect_close(train_sharded(setting, 4, 1e-2), train_plain(GetParam(), 4, 1e-2), 1e-5);
}

TEST_P(Training, DelaysBeforeCollectivesChangeNothing) {
  Setting plain{.world = GetParam()};
  auto want = train_sharded(plain, 3, 1e-2);
  for (std::string slow : {"all_gather", "reduce_scatter"}) {
    Setting setting{.world = GetParam()};
    setting.world_options.on_operation = [&](const comm::OperationEvent& e) {
      if (e.op == slow && (e.rank + e.sequence) % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      return comm::Fault::None;
    };
    auto got = train_sharded(setting, 3, 1e-2);
    EXPECT_EQ(got.losses, want.losses) << slow;
    for (size_t i = 0; i < want.weights.size(); ++i) EXPECT_TRUE(at::equal(got.weights[i], want.weights[i])) << slow << " parameter " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Training, ::testing::Values(1, 2, 3, 4));

TEST(TrainingOnOneRank, IsBitEqualToPlainTraining) {
  auto want = train_plain(1, 5, 1e-2);
  auto got = train_sharded({.world = 1}, 5, 1e-2);
  EXPECT_EQ(got.losses, want.losses);
  for (size_t i = 0; i < want.weights.size(); ++i) EXPECT_TRUE(at::equal(got.weights[i], want.weights[i])) << "parameter " << i;
}

TEST(Training, CheckerSeesAWrongWeight) {
  auto want = train_plain(2, 2, 1e-2);
  auto wrong = want;
  wrong.weights[1] = want.weights[1] * 1.001;
  EXPECT_GT(relative_error(wrong.weights[1], want.weights[1]), 1e-5);
}

TEST(Memory, ReservedBuffersStayWithinThePrintedFormula) {
  for (int ranks : {1, 2, 3})
    for (bool accumulates : {false, true})
      run_local_world(ranks, [&](std::shared_ptr<World> world) {
        auto net = make_tiny_net(1, /*blocks=*/6);
        FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
        shard_tiny_net(net, Mesh::shard(world), options, options);
        auto formula = memory_formula(*net, accumulates);
        int64_t after_second_step = 0;
        for (int step = 0; step < 4; ++step) {
          unit_of(*net).set_requires_gradient_sync(!accumulates || step % 2 == 1);
          auto ids = tokens(world->rank() + step);
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
}  // namespace fsdpp::test

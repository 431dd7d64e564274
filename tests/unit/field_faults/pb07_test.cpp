// PB-07: ranks use different parameters in the same step.
#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "unit/field_faults/wires.h"

namespace fsdpp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// -- both in one unit ------------------------------------------------------------------------------------------------

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    e0 = register_parameter("e0", at::ones({4}));
    e1 = register_parameter("e1", at::ones({4}));
  }
  at::Tensor forward(int which) { return (which == 0 ? e0 : e1).sum(); }
  at::Tensor e0, e1;
};
FSDPP_MODULE(Experts);

void expect_both_moved(const at::Tensor& e0, const at::Tensor& e1) {
  for (const auto& e : {e0, e1}) {
    ASSERT_TRUE(e.grad().defined()) << "a gradient that one rank misses counts as zero there";
    EXPECT_TRUE(all_equal(full_grad(e), 1));
  }
}

TEST(FieldFaults, PB07_InOneUnitMissingGradientsCountAsZero) {
  each_rank(2, [](std::shared_ptr<World> world) {
    Experts model;
    fully_shard(model, Mesh::shard(world));
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
    (model(world->rank()) * 2).backward();
    EXPECT_TRUE(nothing_unsharded(*model));
    expect_both_moved(model->e0, model->e1);
    sgd.step();
    EXPECT_TRUE(all_near(full_tensor(model->e0), 0.9));
    EXPECT_TRUE(all_near(full_tensor(model->e1), 0.9));
  });
}

TEST(FieldFaults, PB07_OnOneRankWhatIsUnusedHasNoGradient) {
  each_rank(1, [](std::shared_ptr<World> world) {
    Experts model;
    fully_shard(model, Mesh::shard(world));
    (model(0) * 2).backward();
    EXPECT_TRUE(all_equal(full_grad(model->e0), 2));
    EXPECT_FALSE(model->e1.grad().defined());
  });
}

TEST(FieldFaults, PB07_WhatNoRankUsesHasNoGradientOnAny) {
  each_rank(2, [](std::shared_ptr<World> world) {
    Experts model;
    fully_shard(model, Mesh::shard(world));
    (model(0) * 2).backward();
    EXPECT_TRUE(all_equal(full_grad(model->e0), 2));
    EXPECT_FALSE(model->e1.grad().defined());
  });
}

// -- each in its own unit --------------------------------------------------------------------------------------------

struct ExpertUnitsImpl : torch::nn::Module {
  ExpertUnitsImpl() {
    e0 = register_module("e0", Sum(at::ones({4})));
    e1 = register_module("e1", Sum(at::ones({4})));
  }
  at::Tensor forward(int which) { return which == 0 ? e0() : e1(); }
  Sum e0{nullptr}, e1{nullptr};
};
FSDPP_MODULE(ExpertUnits);

ExpertUnits sharded_experts(const std::shared_ptr<World>& world) {
  auto mesh = Mesh::shard(world);
  ExpertUnits model;
  fully_shard(model->e0, mesh), fully_shard(model->e1, mesh);
  fully_shard(model, mesh);
  return model;
}

class UnitsOfSomeRanks : public ::testing::TestWithParam<Wire> {};

TEST_P(UnitsOfSomeRanks, PB07_AreAnErrorThatNamesBothUnitsAndRanks) {
  const auto begin = std::chrono::steady_clock::now();
  const auto messages = verdicts(GetParam(), 2, [](std::shared_ptr<World> world) {
    auto model = sharded_experts(world);
    (model(world->rank()) * 2).backward();
  });
  for (const auto& message : messages)
    EXPECT_THAT(message, AllOf(HasSubstr("e0"), HasSubstr("e1"), HasSubstr("rank 0"), HasSubstr("rank 1")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

INSTANTIATE_TEST_SUITE_P(Wires, UnitsOfSomeRanks, ::testing::Values(Wire::InProcess, Wire::Sockets));

/// The declared way: every unit is gathered on every rank in one order and kept for backward; what a rank does not use is
/// reduced as zeros.
void expect_declared_units_train(int ranks, int steps) {
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    auto model = sharded_experts(world);
    unit_of(*model).set_reduce_scatter_unused_params(true);
    unit_of(*model).set_reshard_after_forward(false);
    torch::optim::SGD sgd({model->e0->w, model->e1->w}, torch::optim::SGDOptions(0.1));
    for (int step = 1; step <= steps; ++step) {
      sgd.zero_grad();
      for (auto& u : units(*model)) u.unshard();
      (model(world->rank()) * 2).backward();
      EXPECT_TRUE(nothing_unsharded(*model)) << "after step " << step;
      for (const auto& e : {model->e0->w, model->e1->w}) {
        ASSERT_TRUE(e.grad().defined());
        EXPECT_TRUE(all_equal(full_grad(e), ranks == 2 ? 1 : e.is_same(model->e0->w) ? 2 : 0));
      }
      sgd.step();
      EXPECT_TRUE(all_near(full_tensor(model->e0->w), ranks == 2 ? 1 - 0.1 * step : 1 - 0.2 * step));
      EXPECT_TRUE(all_near(full_tensor(model->e1->w), ranks == 2 ? 1 - 0.1 * step : 1));
    }
  });
}

TEST(FieldFaults, PB07_UnitsDeclaredAsUnusedOnSomeRanksTrain) {
  expect_declared_units_train(2, 2);
  expect_declared_units_train(1, 2);
}

}  // namespace
}  // namespace fsdpp::test

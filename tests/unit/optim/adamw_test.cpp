#include "fsdpp/optim/adamw.h"

#include <gmock/gmock.h>
#include <torch/optim/adamw.h>

#include "fsdpp/base/error.h"
#include "unit/optim/models.h"

namespace fsdpp::optim {
namespace {

using test::bag;
using ::testing::HasSubstr;

/// Relative to the value, or to the size of one update where that is larger.
double largest_relative_error(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs() / b.abs().clamp_min(1e-2)).max().item<double>();
}

TEST(AdamW, OnAPlainModuleMatchesLibTorchOverTenSteps) {
  at::manual_seed(3);
  const auto ours = bag(
      {{"w", at::randn({33, 7})}, {"b", at::randn({33})}, {"s", at::randn({})}, {"d", at::randn({5}, at::kDouble)}});
  const auto theirs = bag({{"w", (*ours)["w"]}, {"b", (*ours)["b"]}, {"s", (*ours)["s"]}, {"d", (*ours)["d"]}});
  AdamW optimizer(*ours, {.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1});
  torch::optim::AdamW reference(theirs->parameters(),
                                torch::optim::AdamWOptions(1e-2).betas({0.8, 0.95}).weight_decay(0.1));
  for (int step = 0; step < 10; ++step) {
    for (const char* name : {"w", "b", "s", "d"}) {
      const at::Tensor grad = at::randn((*ours)[name].sizes(), (*ours)[name].options().requires_grad(false));
      (*ours)[name].mutable_grad() = grad.clone();
      (*theirs)[name].mutable_grad() = grad.clone();
    }
    optimizer.step();
    reference.step();
    for (const char* name : {"w", "b", "s", "d"}) {
      EXPECT_LT(largest_relative_error((*ours)[name].detach(), (*theirs)[name].detach()), 1e-6)
          << name << " step " << step;
    }
  }
}

TEST(AdamW, LeavesParametersWithoutGradientAlone) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  AdamW optimizer(*model);
  for (int step = 0; step < 2; ++step) {
    (*model)["a"].mutable_grad() = at::ones({4});
    optimizer.step();
  }
  EXPECT_TRUE(at::equal((*model)["b"], at::ones({4})));
  EXPECT_FALSE(at::equal((*model)["a"], at::ones({4})));
  EXPECT_EQ(optimizer.state((*model)["a"]).step, 2);
  EXPECT_EQ(optimizer.state((*model)["b"]).step, 0);
  EXPECT_FALSE(optimizer.state((*model)["b"]).exp_avg.defined());
  EXPECT_EQ(optimizer.state_bytes(), 2 * 4 * 4);
}

TEST(AdamW, StateHasTheParametersShapeAndWideMoments) {
  const auto model =
      bag({{"h", at::ones({2, 3}).to(at::kBFloat16)}, {"d", at::ones({2}, at::kDouble)}, {"e", at::ones({0, 3})}});
  AdamW optimizer(*model);
  for (const char* name : {"h", "d", "e"}) (*model)[name].mutable_grad() = at::ones_like((*model)[name]).detach();
  optimizer.step();
  EXPECT_EQ(optimizer.state((*model)["h"]).exp_avg.sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(optimizer.state((*model)["h"]).exp_avg_sq.scalar_type(), at::kFloat);
  EXPECT_EQ(optimizer.state((*model)["d"]).exp_avg.scalar_type(), at::kDouble);
  EXPECT_EQ(optimizer.state((*model)["e"]).exp_avg.sizes(), at::IntArrayRef({0, 3}));
  EXPECT_EQ(optimizer.state((*model)["e"]).step, 1);
}

TEST(AdamW, GradScaleMultipliesEveryGradient) {
  const at::Tensor start = at::randn({50});
  const at::Tensor grad = at::randn({50});
  const auto a = bag({{"w", start}});
  const auto b = bag({{"w", start}});
  AdamW scaled(*a);
  AdamW plain(*b);
  (*a)["w"].mutable_grad() = grad.clone();
  (*b)["w"].mutable_grad() = grad * 0.25;
  scaled.step(0.25);
  plain.step();
  EXPECT_TRUE(at::equal((*a)["w"], (*b)["w"]));
}

TEST(AdamW, LearningRateChangesFromTheNextStep) {
  const auto model = bag({{"w", at::ones({1})}});
  AdamW optimizer(*model, {.lr = 0.5, .eps = 0, .weight_decay = 0});
  optimizer.set_lr(0.125);
  EXPECT_EQ(optimizer.lr(), 0.125);
  (*model)["w"].mutable_grad() = at::ones({1});
  optimizer.step();
  EXPECT_NEAR((*model)["w"].item<double>(), 0.875, 1e-6);
}

TEST(AdamW, WorksOnTransposedMemoryAndGradientsOfAnotherLayout) {
  const at::Tensor start = at::randn({4, 6});
  const at::Tensor grad = at::randn({4, 6});
  const auto a = bag({{"w", start}});
  (*a)["w"].set_data(start.t().contiguous().t());
  const auto b = bag({{"w", start}});
  AdamW of_a(*a);
  AdamW of_b(*b);
  (*a)["w"].mutable_grad() = grad.clone();
  (*b)["w"].mutable_grad() = grad.clone();
  of_a.step();
  of_b.step();
  EXPECT_TRUE(at::equal((*a)["w"], (*b)["w"]));
  EXPECT_TRUE(at::equal(of_a.state((*a)["w"]).exp_avg, of_b.state((*b)["w"]).exp_avg));
}

TEST(AdamW, StepIsSeenByAutograd) {
  const auto model = bag({{"w", at::ones({3})}});
  const at::Tensor loss = ((*model)["w"] * (*model)["w"]).sum();
  AdamW optimizer(*model);
  (*model)["w"].mutable_grad() = at::ones({3});
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);  // w was modified in place
}

TEST(AdamW, ATiedParameterIsUpdatedOnce) {
  const auto child = bag({});
  const auto model = std::make_shared<test::Bag>(test::Named{{"w", at::ones({2})}}, child);
  child->register_parameter("tied", (*model)["w"]);
  AdamW optimizer(*model, {.lr = 0.5, .eps = 0, .weight_decay = 0});
  (*model)["w"].mutable_grad() = at::ones({2});
  optimizer.step();
  EXPECT_EQ(optimizer.state((*model)["w"]).step, 1);
  EXPECT_NEAR((*model)["w"][0].item<double>(), 0.5, 1e-6);
}

TEST(AdamW, ZeroGradDropsOrClears) {
  const auto model = bag({{"w", at::ones({3})}});
  AdamW optimizer(*model);
  (*model)["w"].mutable_grad() = at::ones({3});
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ((*model)["w"].grad().sum().item<double>(), 0);
  optimizer.zero_grad();
  EXPECT_FALSE((*model)["w"].grad().defined());
}

TEST(AdamW, IgnoresIntegerParametersWithoutGradient) {
  const auto model = bag({{"n", at::ones({3}, at::kLong)}, {"w", at::ones({3})}});
  AdamW optimizer(*model);
  (*model)["w"].mutable_grad() = at::ones({3});
  EXPECT_NO_THROW(optimizer.step());
  EXPECT_TRUE(at::equal((*model)["n"], at::ones({3}, at::kLong)));
}

TEST(AdamW, AfterTheParameterChangedItsShapeThenUsageErrorAndNothingIsUpdated) {
  const auto model = bag({{"a", at::ones({3})}, {"w", at::ones({3})}});
  AdamW optimizer(*model);
  for (const char* name : {"a", "w"}) (*model)[name].mutable_grad() = at::ones({3});
  optimizer.step();
  const at::Tensor before = (*model)["a"].detach().clone();
  (*model)["w"].set_data(at::ones({5}));
  (*model)["w"].mutable_grad() = at::ones({5});
  try {
    optimizer.step();
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("'w'"));
  }
  EXPECT_TRUE(at::equal((*model)["a"], before));
}

TEST(AdamW, GroupsHaveOptionsOfTheirOwn) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}, {"c", at::ones({4})}});
  const auto alone = [](const AdamWOptions& options) {
    const auto one = bag({{"w", at::ones({4})}});
    AdamW optimizer(*one, options);
    (*one)["w"].mutable_grad() = at::ones({4});
    optimizer.step();
    return (*one)["w"].detach();
  };
  const AdamWOptions fast{.lr = 0.5, .weight_decay = 0};
  const AdamWOptions slow{.lr = 0.25, .weight_decay = 0.5};
  AdamW optimizer({{{(*model)["a"]}, fast}, {{(*model)["b"]}, slow}});
  EXPECT_EQ(optimizer.group_count(), 2U);
  optimizer.add_group({(*model)["c"]}, {.lr = 0.125});
  for (const char* name : {"a", "b", "c"}) (*model)[name].mutable_grad() = at::ones({4});
  optimizer.step();
  EXPECT_TRUE(at::equal((*model)["a"].detach(), alone(fast)));
  EXPECT_TRUE(at::equal((*model)["b"].detach(), alone(slow)));
  EXPECT_TRUE(at::equal((*model)["c"].detach(), alone({.lr = 0.125})));
  optimizer.set_lr(1.0, 1);
  EXPECT_EQ(optimizer.lr(0), 0.5);
  EXPECT_EQ(optimizer.lr(1), 1.0);
  EXPECT_EQ(optimizer.options(1).weight_decay, 0.5);
  optimizer.set_lr(2.0);
  EXPECT_EQ(optimizer.lr(2), 2.0);
  EXPECT_EQ(optimizer.parameters().size(), 3U);
}

TEST(AdamW, AParameterInTwoGroupsOrAMissingGroupThenUsageError) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  AdamW optimizer(*model);
  EXPECT_THROW(optimizer.add_group({(*model)["b"]}, {}), UsageError);
  EXPECT_THROW(optimizer.add_group({at::ones({2})}, {.lr = -1}), ConfigError);
  EXPECT_EQ(optimizer.group_count(), 1U);
  EXPECT_EQ(optimizer.parameters().size(), 2U);
  EXPECT_THROW((void)optimizer.lr(1), UsageError);
  EXPECT_THROW(optimizer.set_lr(0.5, 1), UsageError);
}

TEST(AdamW, WithAmsgradMatchesLibTorch) {
  const auto ours = bag({{"w", at::randn({33})}});
  const auto theirs = bag({{"w", (*ours)["w"]}});
  AdamW optimizer(*ours, {.lr = 1e-2, .beta2 = 0.5, .amsgrad = true});
  torch::optim::AdamW reference(theirs->parameters(), torch::optim::AdamWOptions(1e-2).betas({0.9, 0.5}).amsgrad(true));
  for (int step = 0; step < 4; ++step) {
    const at::Tensor grad = at::randn({33}) * (5 - step);
    (*ours)["w"].mutable_grad() = grad.clone();
    (*theirs)["w"].mutable_grad() = grad.clone();
    optimizer.step();
    reference.step();
    EXPECT_LT(largest_relative_error((*ours)["w"].detach(), (*theirs)["w"].detach()), 1e-6);
  }
  const auto state = optimizer.state((*ours)["w"]);
  EXPECT_FALSE(at::equal(state.max_exp_avg_sq, state.exp_avg_sq));
  EXPECT_EQ(optimizer.state_bytes(), 3 * 33 * 4);
}

TEST(AdamW, WhenItMaximizesThenClimbs) {
  const auto up = bag({{"w", at::ones({3})}});
  const auto down = bag({{"w", at::ones({3})}});
  AdamW climbs(*up, {.lr = 0.5, .maximize = true});
  AdamW descends(*down, {.lr = 0.5});
  (*up)["w"].mutable_grad() = at::ones({3});
  (*down)["w"].mutable_grad() = at::ones({3}) * -1;
  climbs.step();
  descends.step();
  EXPECT_TRUE(at::equal((*up)["w"].detach(), (*down)["w"].detach()));
  EXPECT_GT((*up)["w"][0].item<double>(), 1.4);
}

TEST(AdamW, WithOffloadedStateDoesTheSame) {
  const auto a = bag({{"w", at::randn({50})}, {"e", at::ones({0})}, {"d", at::ones({7}, at::kDouble)}});
  const auto b = bag({{"w", (*a)["w"]}, {"e", at::ones({0})}, {"d", at::ones({7}, at::kDouble)}});
  AdamW offloaded(*a, {.offload_state = true});
  AdamW plain(*b);
  for (int step = 0; step < 3; ++step) {
    for (const char* name : {"w", "e", "d"}) {
      const at::Tensor grad = at::randn((*a)[name].sizes(), (*a)[name].options().requires_grad(false));
      (*a)[name].mutable_grad() = grad;
      (*b)[name].mutable_grad() = grad;
    }
    offloaded.step();
    plain.step();
  }
  for (const char* name : {"w", "e", "d"}) {
    EXPECT_TRUE(at::equal((*a)[name].detach(), (*b)[name].detach()));
    EXPECT_TRUE(at::equal(offloaded.state((*a)[name]).exp_avg_sq, plain.state((*b)[name]).exp_avg_sq));
    EXPECT_TRUE(offloaded.state((*a)[name]).exp_avg.device().is_cpu());
  }
  EXPECT_EQ(offloaded.state_bytes(), plain.state_bytes());
}

TEST(AdamW, WithBadOptionsOrAForeignTensorThenErrors) {
  const auto model = bag({{"w", at::ones({3})}});
  EXPECT_THROW(AdamW(*model, {.lr = -1}), ConfigError);
  EXPECT_THROW(AdamW(*model, {.beta1 = 1.0}), ConfigError);
  AdamW optimizer(*model);
  EXPECT_THROW((void)optimizer.state(at::ones({3})), UsageError);
}

}  // namespace
}  // namespace fsdpp::optim

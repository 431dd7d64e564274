#include "fsdpp/optim/lr_schedule.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/sgd.h"
#include "unit/optim/models.h"

namespace fsdpp::optim {
namespace {

using test::bag;

std::vector<double> values(const Schedule& schedule, int64_t count) {
  std::vector<double> result;
  for (int64_t s = 0; s < count; ++s) result.push_back(schedule(s));
  return result;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-15) << "step " << i;
}

TEST(Schedule, CosineIsHalfAWave) {
  // (1 + cos(π s / 4)) / 2
  const double r = std::sqrt(0.5);
  expect_near(values(cosine(4), 7), {1, (1 + r) / 2, 0.5, (1 - r) / 2, 0, 0, 0});
  expect_near(values(cosine(2, 0.5), 4), {1, 0.75, 0.5, 0.5});
}

/// CosineAnnealingLR computes each rate from the one before: (1 + cos(π s/T)) / (1 + cos(π (s−1)/T)) · (lr − min) +
/// min.
TEST(Schedule, CosineFollowsCosineAnnealingsRecursion) {
  const int64_t steps = 50;
  const double least = 0.1;
  const double pi = std::acos(-1.0);
  double rate = 1;
  for (int64_t s = 1; s < steps; ++s) {
    const auto wave = [&](int64_t t) { return 1 + std::cos(pi * static_cast<double>(t) / static_cast<double>(steps)); };
    rate = wave(s) / wave(s - 1) * (rate - least) + least;
    EXPECT_NEAR(cosine(steps, least)(s), rate, 1e-12) << s;
  }
}

TEST(Schedule, LinearEndsAndStays) {
  expect_near(values(linear(4), 6), {1, 0.75, 0.5, 0.25, 0, 0});
  expect_near(values(linear(2, 0.5), 4), {1, 0.75, 0.5, 0.5});
  expect_near(values(constant(), 3), {1, 1, 1});
}

TEST(Schedule, WarmupRisesToWhatComesThen) {
  expect_near(values(warmup_constant(4), 6), {0, 0.25, 0.5, 0.75, 1, 1});
  expect_near(values(warmup_constant(4, 0.5), 6), {0.5, 0.625, 0.75, 0.875, 1, 1});
  expect_near(values(warmup_linear(2, 6), 8), {0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0});
  expect_near(values(warmup_cosine(2, 4, 0.5, 0.25), 6), {0.25, 0.625, 1, 0.75, 0.5, 0.5});
  expect_near(values(warmup(2, [](int64_t s) { return 4.0 + static_cast<double>(s); }), 4), {0, 2, 4, 5});
  expect_near(values(warmup_constant(0), 2), {1, 1});
}

TEST(Schedule, OfNonsenseThenConfigError) {
  EXPECT_THROW((void)cosine(-1), ConfigError);
  EXPECT_THROW((void)linear(5, -0.5), ConfigError);
  EXPECT_THROW((void)warmup(5, nullptr), ConfigError);
  EXPECT_THROW((void)warmup_cosine(5, 4), ConfigError);
}

TEST(LrScheduler, SetsEveryGroupOfOurOptimizers) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  AdamW adamw({{{(*model)["a"]}, {.lr = 8}}, {{(*model)["b"]}, {.lr = 16}}});
  LrScheduler scheduler(adamw, warmup_linear(2, 6));
  EXPECT_EQ(adamw.lr(1), 0);
  scheduler.step();
  EXPECT_EQ(adamw.lr(0), 4);
  EXPECT_EQ(adamw.lr(1), 8);
  scheduler.set_step(5);
  EXPECT_EQ(adamw.lr(0), 2);
  EXPECT_EQ(adamw.lr(1), 4);
  scheduler.step();
  EXPECT_EQ(scheduler.current_step(), 6);
  EXPECT_EQ(adamw.lr(0), 0);
  EXPECT_EQ(scheduler.base_rates(), (std::vector<double>{8, 16}));
  EXPECT_THROW(scheduler.set_step(-1), UsageError);
  EXPECT_THROW(LrScheduler(adamw, nullptr), UsageError);
}

TEST(LrScheduler, ResumesFromTheStepNumberAlone) {
  const auto model = bag({{"w", at::ones({4})}});
  SGD first(*model, {.lr = 0.3});
  LrScheduler run(first, warmup_cosine(3, 20, 0.1));
  for (int s = 0; s < 7; ++s) run.step();
  SGD second(*model, {.lr = 0.3});
  LrScheduler resumed(second, warmup_cosine(3, 20, 0.1));
  resumed.set_step(run.current_step());
  EXPECT_EQ(second.lr(), first.lr());
  EXPECT_GT(first.lr(), 0.03);
}

TEST(LrScheduler, AGroupAddedLaterStartsFromItsOwnRate) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  SGD optimizer({{{(*model)["a"]}, {.lr = 1}}});
  LrScheduler scheduler(optimizer, linear(4));
  scheduler.step();
  optimizer.add_group({(*model)["b"]}, {.lr = 10});
  scheduler.step();
  EXPECT_EQ(optimizer.lr(0), 0.5);
  EXPECT_EQ(optimizer.lr(1), 5);
}

TEST(LrScheduler, SetsLibTorchsOptimizers) {
  const auto model = bag({{"a", at::ones({4})}, {"b", at::ones({4})}});
  torch::optim::SGD sgd({(*model)["a"]}, torch::optim::SGDOptions(8));
  sgd.add_param_group(
      torch::optim::OptimizerParamGroup({(*model)["b"]}, std::make_unique<torch::optim::SGDOptions>(4)));
  LrScheduler of_sgd(sgd, linear(4));
  of_sgd.step();
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 6);
  EXPECT_EQ(sgd.param_groups()[1].options().get_lr(), 3);
  (*model)["a"].mutable_grad() = at::ones({4});
  sgd.step();
  EXPECT_EQ((*model)["a"][0].item<double>(), -5);
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(8));
  LrScheduler of_adamw(adamw, constant());
  EXPECT_EQ(adamw.param_groups()[0].options().get_lr(), 8);
}

}  // namespace
}  // namespace fsdpp::optim

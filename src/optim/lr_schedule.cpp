#include "fsdpp/optim/lr_schedule.h"

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/enforce.h"
#include "fsdpp/optim/optimizer.h"

namespace fsdpp::optim {
namespace {

void check(const char* who, int64_t steps, double factor) {
  FSDPP_ENFORCE(steps >= 0 && factor >= 0, ConfigError, "{}: expected steps and a factor >= 0, got {} and {}", who,
                steps, factor);
}

/// How much of `steps` is done at step s, in [0, 1].
double progress(int64_t s, int64_t steps) {
  return s >= steps ? 1.0 : static_cast<double>(s) / static_cast<double>(steps);
}

int64_t after_warmup(int64_t warmup_steps, int64_t total_steps) {
  FSDPP_ENFORCE(total_steps >= warmup_steps, ConfigError,
                "schedule: expected total_steps >= warmup_steps, got {} and {}", total_steps, warmup_steps);
  return total_steps - warmup_steps;
}

}  // namespace

Schedule constant() {
  return [](int64_t) { return 1.0; };
}

Schedule cosine(int64_t steps, double end) {
  check("cosine", steps, end);
  return [=](int64_t s) { return end + (1.0 - end) * (1.0 + std::cos(std::numbers::pi * progress(s, steps))) / 2.0; };
}

Schedule linear(int64_t steps, double end) {
  check("linear", steps, end);
  return [=](int64_t s) { return 1.0 + (end - 1.0) * progress(s, steps); };
}

Schedule warmup(int64_t steps, Schedule then, double start) {
  check("warmup", steps, start);
  FSDPP_ENFORCE(then != nullptr, ConfigError, "warmup: expected a schedule for the time after it, got none");
  return [=, then = std::move(then)](int64_t s) {
    return s < steps ? (start + (1.0 - start) * progress(s, steps)) * then(0) : then(s - steps);
  };
}

Schedule warmup_cosine(int64_t warmup_steps, int64_t total_steps, double end, double start) {
  return warmup(warmup_steps, cosine(after_warmup(warmup_steps, total_steps), end), start);
}
Schedule warmup_linear(int64_t warmup_steps, int64_t total_steps, double end, double start) {
  return warmup(warmup_steps, linear(after_warmup(warmup_steps, total_steps), end), start);
}
Schedule warmup_constant(int64_t warmup_steps, double start) { return warmup(warmup_steps, constant(), start); }

LrScheduler::LrScheduler(Optimizer& optimizer, Schedule factor)
    : rates_{[&optimizer] { return optimizer.group_count(); },
             [&optimizer](size_t group) { return optimizer.lr(group); },
             [&optimizer](size_t group, double lr) { optimizer.set_lr(lr, group); }},
      factor_(std::move(factor)) {
  set_step(0);
}

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, Schedule factor)
    : rates_{[&optimizer] { return optimizer.param_groups().size(); },
             [&optimizer](size_t group) { return optimizer.param_groups()[group].options().get_lr(); },
             [&optimizer](size_t group, double lr) { optimizer.param_groups()[group].options().set_lr(lr); }},
      factor_(std::move(factor)) {
  set_step(0);
}

void LrScheduler::set_step(int64_t step) {
  FSDPP_ENFORCE(step >= 0 && factor_ != nullptr, UsageError,
                "LrScheduler: expected a schedule and a step >= 0, got {} and step {}",
                factor_ ? "a schedule" : "no schedule", step);
  while (base_rates_.size() < rates_.count()) base_rates_.push_back(rates_.get(base_rates_.size()));
  const double factor = factor_(step);
  for (size_t group = 0; group < base_rates_.size(); ++group) rates_.set(group, base_rates_[group] * factor);
  step_ = step;
}

}  // namespace fsdpp::optim

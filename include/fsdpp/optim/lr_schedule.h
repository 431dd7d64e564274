#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "fsdpp/base/export.h"

namespace torch::optim {
class Optimizer;
}

namespace fsdpp::optim {

class Optimizer;

/// The learning rate of step s = 0, 1, 2, … as a multiple of the optimizer's own: a pure function, so a run that
/// resumes at step s needs nothing but s.
using Schedule = std::function<double(int64_t step)>;

/// 1.
[[nodiscard]] FSDPP_API Schedule constant();
/// Half a cosine wave: end + (1 − end) · (1 + cos(π · min(s / steps, 1))) / 2. From 1 to `end`, then stays there.
/// PyTorch's CosineAnnealingLR(T_max = steps, eta_min = end · lr) up to s = steps.
[[nodiscard]] FSDPP_API Schedule cosine(int64_t steps, double end = 0.0);
/// 1 + (end − 1) · min(s / steps, 1): from 1 to `end`, then stays there. PyTorch's LinearLR(1, end, steps).
[[nodiscard]] FSDPP_API Schedule linear(int64_t steps, double end = 0.0);
/// s < steps: (start + (1 − start) · s / steps) · then(0). From there on then(s − steps).
/// PyTorch's SequentialLR of LinearLR(start, 1, steps) and `then`.
/// All four throw ConfigError for negative steps or a factor below 0.
[[nodiscard]] FSDPP_API Schedule warmup(int64_t steps, Schedule then, double start = 0.0);

/// warmup(warmup_steps, cosine(total_steps − warmup_steps, end)), and so on: what most runs use. With the default start
/// of 0 the first step's rate is 0; 1.0 / warmup_steps avoids that.
[[nodiscard]] FSDPP_API Schedule warmup_cosine(int64_t warmup_steps, int64_t total_steps, double end = 0.0,
                                               double start = 0.0);
[[nodiscard]] FSDPP_API Schedule warmup_linear(int64_t warmup_steps, int64_t total_steps, double end = 0.0,
                                               double start = 0.0);
[[nodiscard]] FSDPP_API Schedule warmup_constant(int64_t warmup_steps, double start = 0.0);

/// Sets the learning rates of an optimizer's groups by a schedule, as PyTorch's LambdaLR: rate = base rate · factor(s),
/// where the base rate is what the group had when this scheduler first saw it. The optimizer must outlive it. Local.
class FSDPP_API LrScheduler {
 public:
  /// Sets the rates of step 0.
  LrScheduler(Optimizer& optimizer, Schedule factor);
  LrScheduler(torch::optim::Optimizer& optimizer, Schedule factor);

  /// Call it after each of the optimizer's steps: sets the rates of the next one.
  void step() { set_step(step_ + 1); }
  /// The only state: the step whose rates are set.
  [[nodiscard]] int64_t current_step() const noexcept { return step_; }
  void set_step(int64_t step);
  /// Base rates by group.
  [[nodiscard]] const std::vector<double>& base_rates() const noexcept { return base_rates_; }

 private:
  struct Rates {
    std::function<size_t()> count;
    std::function<double(size_t)> get;
    std::function<void(size_t, double)> set;
  };
  Rates rates_;
  Schedule factor_;
  std::vector<double> base_rates_;
  int64_t step_ = 0;
};

}  // namespace fsdpp::optim

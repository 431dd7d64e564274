#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/base/export.h"

namespace torch::optim {
class Optimizer;
}

namespace fsdpp::optim {

class Optimizer;

/// Defaults are PyTorch's.
struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// Off: every method passes through, steps are never skipped.
  bool enabled = true;
};

/// Loss scaling for fp16, with the semantics of PyTorch's GradScaler, over sharded parameters. All ranks skip the same
/// steps, so that the scale is the same on all of them. An iteration:
///
///   scaler.scale(loss).backward();      // once for each micro-batch
///   scaler.unscale_(*model);            // only to look at the gradients, or to clip them
///   fsdpp::optim::clip_grad_norm_(*model, 1.0);
///   scaler.step(optimizer);             // AdamW, SGD or one of LibTorch's; more than one optimizer is fine
///   scaler.update();
///
/// Gradients are unscaled in place, in their own dtype: that of the parameters, which must not be fp16 (shards stay
/// fp32 under a mixed precision policy). Methods marked collective must be called by all ranks alike.
class FSDPP_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// loss · scale, in fp32 where the loss is a single fp16 number. Part of the autograd graph. Local.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) const;

  /// Divides all gradients of the model, or of the optimizer, by the scale, and finds out whether they are finite on
  /// every rank. Collective: for each mesh one all-reduce of one number among its shards and one among its replicas.
  /// Blocks the host. Throws UsageError, before any gradient is changed: when one of these parameters was unscaled or
  /// stepped already since the last update(), and for fp16 gradients.
  void unscale_(const torch::nn::Module& model);
  void unscale_(const Optimizer& optimizer);
  void unscale_(const torch::optim::Optimizer& optimizer);

  /// Unscales what was not yet unscaled of the optimizer's gradients (collective), and calls optimizer.step() if those
  /// that were unscaled with them are all finite on every rank. Returns whether it did, the same on every rank. Throws
  /// UsageError when called twice for one optimizer since the last update().
  bool step(Optimizer& optimizer);
  bool step(torch::optim::Optimizer& optimizer);

  /// Multiplies the scale by backoff_factor when non-finite gradients were found since the last update(), else, after
  /// growth_interval such updates in a row, by growth_factor (unless that is infinite in fp32). Throws UsageError when
  /// nothing was unscaled since the last update(). Local.
  void update();
  /// Sets the scale for the next iteration instead. Throws ConfigError unless it is positive and finite.
  void update(double new_scale);

  /// 1 when not enabled.
  [[nodiscard]] double scale() const noexcept;
  [[nodiscard]] bool enabled() const noexcept;

  /// What a checkpoint needs.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0;
  };
  [[nodiscard]] State state() const noexcept;
  /// Throws ConfigError for a scale that is not positive and finite, or a negative tracker.
  void set_state(const State& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp::optim

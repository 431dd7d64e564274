#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/base/export.h"

namespace fsdpp::optim {

/// Defaults are PyTorch's.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// AdamW over the local shards, one fused pass over each unit's flat shard buffer (adjacent parameters that have
/// gradients are updated in one launch). Also takes parameters that are not sharded. State: fp32 first and second
/// moment (fp64 for fp64 parameters) with the layout of the shard buffer, a step count per parameter. Formula: see
/// kernels::AdamWArgs.
///
/// Streams: queues on the current stream; never synchronises. No communication. Build it after fully_shard.
/// A parameter whose gradient is undefined is left alone, as in PyTorch.
class FSDPP_API AdamW {
 public:
  AdamW(const torch::nn::Module& model, AdamWOptions options = {});
  ~AdamW();
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  /// One update. `grad_scale` multiplies every gradient on the way in.
  void step(double grad_scale = 1.0);
  /// Drops the gradients (set_to_none, the default) or fills them with zeros.
  void zero_grad(bool set_to_none = true);
  void set_lr(double lr) noexcept;
  [[nodiscard]] double lr() const noexcept;

  /// State of one parameter: views shaped like the local shard; undefined before the first update of that parameter.
  struct ParamState {
    at::Tensor exp_avg, exp_avg_sq;
    int64_t step = 0;
  };
  /// Throws UsageError if `parameter` is not one of this optimizer's.
  [[nodiscard]] ParamState state(const at::Tensor& parameter) const;
  /// Bytes of optimizer state on this rank.
  [[nodiscard]] int64_t state_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp::optim

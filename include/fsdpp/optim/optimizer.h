#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/base/export.h"

namespace torch::nn {
class Module;
}

namespace fsdpp::optim {

class FlatOptimizer;

/// Parameters with options of their own. They may be sharded or not; each belongs to one group.
template <class Options>
struct ParamGroup {
  std::vector<at::Tensor> params;
  Options options = {};
};

/// What AdamW and SGD share: an update of the local shards in fused passes over each unit's flat shard buffer (adjacent
/// parameters of one group that have gradients are updated in one launch). Also takes parameters that are not sharded.
/// May be made before or after fully_shard, but before the first step. State has the layout of the shard buffer, fp32
/// (fp64 for fp64 parameters), allocated at a parameter's first update.
///
/// Devices: the update runs where the parameter is; a gradient elsewhere is copied there.
/// Streams: queues on the current stream; never synchronises. No communication.
/// A parameter whose gradient is undefined is left alone, as in PyTorch.
class FSDPP_API Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One update. `grad_scale` multiplies every gradient on the way in. Throws UsageError, before anything is changed,
  /// for a parameter that is not sharded now, is not dense, or has another shape, dtype or device than its state.
  void step(double grad_scale = 1.0);
  /// From now on a backward updates each unit at or below `model` as soon as its gradients are reduced, and frees them:
  /// never more than two units' gradients are alive, and an update reads them while they are fresh. step() updates what
  /// no unit manages. With one synchronised backward a step the result is step()'s, to the bit; but on one rank with a
  /// reduce dtype narrower than the parameters' gradients are rounded to it, as Python FSDP2's are, which saves their
  /// bytes (not in units with hooks on parameters).
  ///
  /// What needs all gradients at once then throws UsageError: grad_norm, clip_grad_norm_, GradScaler. Parameters of
  /// units reduced more than once in a backward are updated as often; if a backward throws, the units before stay
  /// updated. Several ranks keep the gradients of a unit in which some are missing until backward ends. The update runs
  /// on the reduction's stream. Ends with the optimizer, or when another one takes the units.
  void step_in_backward(const torch::nn::Module& model);
  /// Drops the gradients (set_to_none, the default) or fills them with zeros.
  void zero_grad(bool set_to_none = true);

  [[nodiscard]] size_t group_count() const noexcept;
  /// Throws UsageError for a group that does not exist.
  [[nodiscard]] double lr(size_t group = 0) const;
  /// From the next step on. Without `group`: of all groups.
  void set_lr(double lr) noexcept;
  void set_lr(double lr, size_t group);

  /// Every parameter, each once.
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
  /// Bytes of optimizer state on this rank, on the device or, where it is offloaded, on the host.
  [[nodiscard]] int64_t state_bytes() const noexcept;

 protected:
  explicit Optimizer(std::unique_ptr<FlatOptimizer> impl);
  [[nodiscard]] FlatOptimizer& impl() const noexcept { return *impl_; }

 private:
  std::shared_ptr<FlatOptimizer> impl_;
};

}  // namespace fsdpp::optim

#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

/// Policies of `fully_shard`; names and defaults as in PyTorch FSDP2.
namespace fsdpp {

/// dtypes of a unit. Only floating-point parameters and tensors are ever cast. Unset: as they are.
struct MixedPrecisionPolicy {
  /// dtype of the gathered parameters, so of forward and backward. Shards and optimizer keep the original dtype. Parameters of
  /// modules with running statistics (a buffer "running_mean": batch norm) stay in theirs, as those buffers do.
  std::optional<c10::ScalarType> param_dtype = std::nullopt;
  /// dtype in which gradients are reduced (on the wire and in the sum). Unset: the dtype of the gathered parameters.
  /// Sharded gradients have the parameters' dtype; but those of one rank that an optimizer drops inside backward
  /// (step_in_backward) keep this one.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  /// dtype to which floating-point outputs of the unit's forward are cast.
  std::optional<c10::ScalarType> output_dtype = std::nullopt;
  /// Cast floating-point inputs of the unit's forward to param_dtype. One argument less: `module(x, no_cast(y))`.
  bool cast_forward_inputs = true;
  /// dtype to which fully_shard casts the floating-point buffers of the unit's modules (those below nested units are theirs),
  /// once and for good. Unset, as in FSDP2: buffers keep their dtype; the running statistics of norms should, since sums of
  /// small steps get lost in 16 bits. LibTorch's batch norm wants weights and statistics of one dtype: best a unit of its own with
  /// param_dtype unset and output_dtype set.
  std::optional<c10::ScalarType> buffer_dtype = std::nullopt;
};

/// What happens to the gathered parameters between forward and backward.
///   true: freed, gathered again for backward.  false: kept.
///   k > 1: each rank keeps 1/k of them, so that backward gathers among k neighbours only; k divides the shard axis (k = its
///   size is true, k = 1 is false).
class ReshardAfterForward {
 public:
  ReshardAfterForward(bool reshard) : group_(reshard ? 0 : 1) {}  // NOLINT: written as true or false
  ReshardAfterForward(int group_size) : group_(group_size) {}     // NOLINT: written as a number
  /// 0: the whole shard axis; 1: kept; else the group's size.
  [[nodiscard]] int group() const noexcept { return group_; }
  [[nodiscard]] bool operator==(const ReshardAfterForward&) const = default;

 private:
  int group_;
};

/// What of a unit lives in the host's memory between its uses. Gathered parameters and the gradient buffer are always on the
/// mesh's device; copies run on the gather and reduction streams, beside computation.
struct CPUOffloadPolicy {
  /// Shards: handles show CPU tensors between steps, a gather copies this rank's part to the device first. Optimizers then update
  /// on the CPU, where their state is too.
  bool params = true;
  /// Sharded gradients: .grad is a CPU tensor. A backward returns when all of them have arrived. LibTorch's own optimizers need
  /// them on the parameter's device (both offloaded, or neither); fsdpp's take any combination.
  bool gradients = true;
  /// Page-locked host memory: copies do not stop the host. Off: less locked memory, slower copies.
  bool pin_memory = true;
};

/// Options of one `fully_shard` call.
struct FullyShardOptions {
  MixedPrecisionPolicy mp_policy = {};
  /// Unset: true, but false for the root unit (the unit whose forward starts the iteration).
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// Parameters that are left alone: not sharded, not cast, their gradients not reduced.
  std::vector<at::Tensor> ignored_params = {};
  /// Unset: everything stays on the device. Parameters may be on the CPU or on the device when fully_shard is called.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// Keep this rank's shard in the policy's param_dtype as well, so that a gather reads it as it is: fsdpp::optim::AdamW writes both in
  /// one pass, other changes of the parameters are cast by the next gather. Costs a 16-bit copy of the shard (on one rank in place of
  /// gathered buffers: nothing is gathered or freed any more). No effect without a param_dtype, or with offloaded parameters.
  bool keep_cast_shard = false;
  /// Give every rank the parameters and buffers of the mesh's rank 0 first. Makes fully_shard collective. Unset: true on a mesh
  /// that replicates (replicas must start equal), else false. Set to true, only rank 0 needs values: other ranks may have the module
  /// on the meta device, and get memory for the whole of this unit's parameters while it is sharded. UsageError on every rank
  /// where rank 0 has no value of a tensor and another rank has one; where no rank has one, the tensor stays on meta.
  std::optional<bool> sync_from_rank0 = std::nullopt;
};

}  // namespace fsdpp

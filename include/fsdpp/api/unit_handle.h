#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/cuda/stream.h"
#include "fsdpp/engine/policy.h"
#include "fsdpp/engine/unit_stats.h"
#include "fsdpp/shard/sharded_param.h"

namespace torch::nn {
class Module;
}

namespace fsdpp {
namespace engine {
class Unit;
}

/// A reference to a unit: what one `fully_shard` call manages. Cheap to copy; keeps nothing alive. Every method throws
/// UsageError if the module is gone. One thread a rank; methods marked collective must be called by all ranks in the same order.
class FSDPP_API UnitHandle {
 public:
  explicit UnitHandle(std::weak_ptr<engine::Unit> unit) : unit_(std::move(unit)) {}

  /// Name of the unit's first module below the root ("" for the root), known after the first forward or name query.
  [[nodiscard]] std::string name() const;
  /// Gathers the unit's parameters now. With `async`, returns once the gather is issued; the unit's next forward, or
  /// wait_unshard(), waits for it. CUDA: on the gather stream, after what the current stream holds. Collective.
  void unshard(bool async = false) const;
  /// Completes an unshard(true): the current stream (CPU: the host) waits for it and the handles show gathered parameters.
  void wait_unshard() const;
  /// Frees the gathered parameters; the handles show the local shards. No communication.
  void reshard() const;
  [[nodiscard]] bool is_sharded() const;
  /// Off: backward keeps unsharded gradients, added up in the reduce dtype, and reduces nothing, until a backward with it on.
  void set_requires_gradient_sync(bool value, bool recurse = true) const;
  /// Hybrid sharding. Off: backward reduces within the shard axis only and keeps the partial sums; the next backward with it on
  /// adds them to its own and reduces among the replicas once.
  void set_requires_all_reduce(bool value, bool recurse = true) const;
  /// true, false, or the size of the group within which backward gathers (collective at first use of a size).
  void set_reshard_after_forward(ReshardAfterForward value, bool recurse = true) const;
  void set_reshard_after_backward(bool value, bool recurse = true) const;
  /// Off: backward never gathers this unit (an embedding's backward does not read its table). What needs it after all gathers it on
  /// demand.
  void set_unshard_in_backward(bool value) const;
  /// On: parameters that a backward did not reach are reduced as zeros, so that ranks may use different ones. Gathers stay
  /// collective: all ranks call the unit's module (or unshard it), in one order; they may differ in what its forward uses.
  void set_reduce_scatter_unused_params(bool value, bool recurse = true) const;
  /// Gradient buffers in use at once on this mesh: 1 unless set, so that gradients are packed when the reduction before them is done. More
  /// let compute run ahead of slow reductions. Of several values the largest holds. ConfigError below 1.
  void set_reduce_scatter_max_input_buffers(int count) const;
  /// Divides the summed gradients by `factor` in place of the number of ranks.
  void set_gradient_divide_factor(double factor, bool recurse = true) const;
  /// Called for each buffer of the unit after its reduction (all-reduce, on a mesh that replicates) with the reduced slice: 1-D, reduce dtype,
  /// already the mean; may change it in place. The current stream is the reduction's. nullptr: none.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook) const;
  /// Units to gather ahead when this one's forward (backward) begins, in place of the recorded order. Empty: the recorded order.
  void set_modules_to_forward_prefetch(const std::vector<UnitHandle>& units) const;
  void set_modules_to_backward_prefetch(const std::vector<UnitHandle>& units) const;
  /// The next iteration's gathers wait for `event` (recorded after the optimizer's step) in place of the current stream.
  void set_post_optim_event(cuda::Event event) const;
  /// After an exception in forward or backward: drops the unfinished gradients, shards every unit of the mesh.
  void reset_iter_state() const;
  /// Off: a backward leaves pending reductions to a later one (several backwards per step).
  void set_is_last_backward(bool value) const;

  /// The unit's own parameters (not those of nested units).
  [[nodiscard]] std::vector<shard::ShardedParam> parameters() const;
  [[nodiscard]] UnitStats stats() const;
  void reset_stats() const;
  [[nodiscard]] UnitMemory memory() const;
  /// The layout plan of the unit's buffers as a table.
  [[nodiscard]] std::string plan(bool rows_by_rank = false) const;

 private:
  [[nodiscard]] static std::vector<std::weak_ptr<engine::Unit>> references(const std::vector<UnitHandle>& units);
  std::weak_ptr<engine::Unit> unit_;
};

/// The unit that `module` belongs to, for a module on which fully_shard was called. Throws UsageError if there is none.
[[nodiscard]] FSDPP_API UnitHandle unit_of(const torch::nn::Module& module);
/// All units at or below `module`, in module order, the module's own first.
[[nodiscard]] FSDPP_API std::vector<UnitHandle> units(const torch::nn::Module& module);
/// The memory formula for the units at or below `module`.
[[nodiscard]] FSDPP_API MemoryFormula memory_formula(const torch::nn::Module& module, bool accumulates = false);
/// Bytes of gathered, gradient and staging buffers that the engine has reserved for the mesh of these units: never more than
/// MemoryFormula::gathered + gradients + staging.
[[nodiscard]] FSDPP_API int64_t reserved_buffer_bytes(const torch::nn::Module& module);
/// Of those, what is registered with NCCL (MeshOptions::symmetric_buffers) and so not part of what LibTorch's allocator counts.
[[nodiscard]] FSDPP_API int64_t registered_buffer_bytes(const torch::nn::Module& module);
/// Metadata of every sharded parameter at or below `module`, in `parameters()` order of the module tree, each once.
[[nodiscard]] FSDPP_API std::vector<shard::ShardedParam> sharded_parameters(const torch::nn::Module& module);
/// Metadata of those of `parameters` that a unit manages, in their order.
[[nodiscard]] FSDPP_API std::vector<shard::ShardedParam> sharded_parameters(const std::vector<at::Tensor>& parameters);

}  // namespace fsdpp

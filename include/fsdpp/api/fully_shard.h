#pragma once
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdpp/api/module_holder.h"
#include "fsdpp/engine/policy.h"
#include "fsdpp/api/unit_handle.h"
#include "fsdpp/base/export.h"
#include "fsdpp/comm/mesh.h"

namespace fsdpp {

/// Makes one unit of `modules`: their parameters, less those that nested units already manage, are cut between the ranks of
/// the mesh's shard axis and from now on gathered around forward and backward and reduced together. Call it bottom-up, the
/// root last; call modules through FSDPP_MODULE holders.
///
/// Before: every rank holds the same full parameters (built from the same seed, or loaded) on the mesh's device; each keeps its
///   own part, the full originals are freed. Handles keep their identity: an optimizer built before stays right. Or all parameters
///   of the unit are on the meta device (fsdpp/api/deferred_init.h): the unit then has a plan but no memory until materialize().
/// After: between steps every parameter's data is this rank's local shard, and its .grad the mean over the ranks of that part.
///   Gradients of parameters that a backward did not reach stay undefined.
/// requires_grad may change later; buffers are made by what it is now. A parameter frozen later has no gradient from then on, but
///   its part of the buffer is still reduced, as zeros, while others of the buffer train. Freeze before where bytes count.
/// Not collective; the first forward is (it compares the model across ranks).
/// Throws UsageError, before anything is changed: on a module that a unit manages already, a parameter on another device than
///   the mesh's, parameters with and without memory in one unit, an empty list; ConfigError for a parameter dtype or policy that can't be trained.
FSDPP_API UnitHandle fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                 std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options = {});

FSDPP_API UnitHandle fully_shard(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<comm::Mesh> mesh,
                                 const FullyShardOptions& options = {});

template <class Impl>
UnitHandle fully_shard(const torch::nn::ModuleHolder<Impl>& holder, std::shared_ptr<comm::Mesh> mesh,
                       const FullyShardOptions& options = {}) {
  return fully_shard(std::shared_ptr<torch::nn::Module>(holder.ptr()), std::move(mesh), options);
}

/// Runs `hook(parameter)` in each backward once the parameter's sharded gradient is final: reduced, in .grad, added to what was there.
/// The handle shows the local shard, gradients are off, the current stream is the reduction's: an optimizer may update it right away
/// and drop .grad. Not called by backwards without gradient synchronisation. A hook set by LibTorch's own means before fully_shard is
/// kept and runs here too; tensor.register_hook still sees the unsharded gradient of this rank alone.
FSDPP_API void register_post_accumulate_grad_hook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> hook);

/// The global tensor behind a sharded parameter, on every rank, on the mesh's device. Collective over the mesh's shard axis.
[[nodiscard]] FSDPP_API at::Tensor full_tensor(const at::Tensor& parameter);

/// Metadata of a sharded parameter. Throws UsageError if no unit manages it.
[[nodiscard]] FSDPP_API shard::ShardedParam sharding_of(const at::Tensor& parameter);

}  // namespace fsdpp

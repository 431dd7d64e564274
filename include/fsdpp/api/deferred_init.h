#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/shard/plan.h"

namespace torch::nn {
class Module;
}

/// Building a model larger than one device, without ever holding it:
///
///     std::optional<fsdpp::DeferredInit> deferred(std::in_place);
///     Model model(config);                                   // meta tensors: shapes, and a record of reset_parameters()
///     deferred.reset();
///     for (auto& block : model->blocks) fsdpp::fully_shard(block, mesh);
///     fsdpp::fully_shard(model, mesh);
///     fsdpp::materialize(*model, {.seed = 7});               // memory for this rank's shards alone, and their values
///
/// Values depend on seed, name and place of an element, not on the number of ranks, the layout, or whether the model is sharded.
namespace fsdpp {

/// While alive on this thread, operators that make a tensor from numbers (empty, zeros, full, arange, rand, …) make it on the meta
/// device, unless a device other than the CPU is named. Operators on such tensors are recorded, also after the scope:
///   constants (fill_, zero_, …), uniform_, normal_, then mul_, add_, sub_, div_ by numbers and clamp_, on the tensor or on views of it;
///   to(dtype), clone, copy_; and what is computed by deterministic operators from tensors without random values (masks, frequencies).
/// Not recorded: random numbers drawn otherwise, arithmetic on random tensors (orthogonal_, sparse_). materialize() names them.
/// Values read while building (item(), data_ptr(), at::tensor({…})) do not exist; give them a Pause. Tensors that a module keeps
/// without registering them stay on meta. One thread; nests.
class FSDPP_API DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
  [[nodiscard]] static bool active() noexcept;

  /// While alive, tensors are made as usual.
  class FSDPP_API Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    bool active_;
  };

 private:
  bool outer_;
};

/// A parameter or buffer that materialize() is about to fill, for MaterializeOptions::init.
class FSDPP_API InitTarget {
 public:
  std::string name;
  std::vector<int64_t> global_sizes;
  shard::Range elements;  ///< this rank's, in row-major order of the global tensor; all of it when it is not sharded
  at::Tensor local;       ///< memory for them, zeroed, contiguous, on its device: the local shard's shape; write to it
  /// Random values by (seed, name, element), the same on every layout; numbers of the parameter's dtype. Uniform in [low, high),
  /// where rounding to the dtype allows; a floating-point dtype of 16, 32 or 64 bits.
  void uniform(double low, double high);
  void normal(double mean, double deviation);
  void constant(double value);

 private:
  friend class Materializer;
  uint64_t seed_ = 0, stream_ = 0;
};

struct MaterializeOptions {
  uint64_t seed = 0;
  /// Asked first for each parameter and buffer on meta; true: it has filled target.local. It must do the same on every rank.
  std::function<bool(const std::string& name, InitTarget& target)> init = {};
  /// Off: parameters get memory only (zeros), to be loaded afterwards; buffers are filled where that is possible.
  bool fill = true;
  /// Of tensors that no unit manages. Unset: the device of the mesh of the module's units, or the CPU where it has none.
  std::optional<c10::Device> device = std::nullopt;
};

/// Gives every parameter and buffer at or below `module` that is on the meta device memory (sharded parameters: this rank's shard
/// alone) and its initial value. Handles keep their identity; parameters tied to each other stay tied. At most one shard, and 64 MiB
/// of host memory for other devices than the CPU, is in work at a time. Names are as seen from `module`: call it for the root.
/// Random values are Philox4x32-10 with key = seed and counter = (element / 4, FNV-1a of the first name), normal ones by Box-Muller.
/// They are not those of LibTorch's generators. No communication.
/// Throws UsageError, before anything is changed if there is no `init`, for a tensor whose value was not recorded, naming it and the
/// operator.
FSDPP_API void materialize(torch::nn::Module& module, const MaterializeOptions& options = {});

/// Gives every parameter and buffer at or below `module` the value that only the mesh's rank 0 has: `source` is called there, once for
/// each name (the first, if tied) in named_parameters(), then named_buffers() order, and returns the whole tensor, of any device and
/// dtype. It travels in pieces of at most 64 MiB, each rank keeping its own rows, so no other rank ever holds a whole tensor.
/// Before: memory for all of it, as from materialize(module, {.fill = false}). Units are resharded.
/// Collective over the mesh of the module's units; without units, only this process. If `source` throws or returns another shape,
/// every rank throws: rank 0 what it met, the others UsageError.
FSDPP_API void load_from_rank0(torch::nn::Module& module, const std::function<at::Tensor(const std::string& name)>& source);

}  // namespace fsdpp

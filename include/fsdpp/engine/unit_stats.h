#pragma once
#include <cstdint>
#include <span>

#include "fsdpp/base/export.h"

namespace fsdpp {

/// Counts since the unit was made (or since reset_stats). For tests and benchmarks.
struct UnitStats {
  int64_t gathers = 0;          ///< all-gathers issued (forward, backward and explicit; 0 of them on the wire at shard size 1)
  int64_t forward_gathers = 0;  ///< of those, issued for a forward
  int64_t backward_gathers = 0; ///< of those, issued for a backward
  int64_t reduces = 0;          ///< reduce-scatters issued
  int64_t all_reduces = 0;      ///< all-reduces among replicas
  int64_t reshards = 0;
};

/// Bytes of a unit on this rank.
struct UnitMemory {
  int64_t shard_bytes = 0;     ///< parameters, original dtype, on the device
  int64_t cast_shard_bytes = 0; ///< the shard in the policy's param_dtype, where it is kept
  int64_t gathered_bytes = 0;  ///< gathered buffer (0 where the gathered parameters are the shard itself)
  int64_t gradient_bytes = 0;  ///< gradient buffer, reduce dtype
  bool keeps_gathered = false;  ///< keeps its gathered memory between forward and backward (the root by default)
  bool reduces_on_wire = false;  ///< more than one rank: every reduction goes through the gradient buffer
  int64_t sharded_gradient_bytes = 0;  ///< on the device
  bool steps_in_backward = false;      ///< the optimizer drops the sharded gradients as soon as they are there
  int64_t staging_bytes = 0;           ///< for a gather of offloaded parameters that are cast
  int64_t gradient_staging_bytes = 0;  ///< for a reduction into offloaded gradients
  int gradient_slots = 1;              ///< gradient buffers of one size in use at once, at most
  bool gathers_ahead = true;           ///< the next unit is gathered while this one is used; not on one rank that offloads nothing
  bool reserves_slots = false;         ///< symmetric buffers on several ranks: all slots are made in the first forward
  bool holds_gradient = false;         ///< its gradient buffer waits for units that come later: unused parameters are reduced too
  int64_t host_bytes = 0;              ///< offloaded parameters and gradients
};

/// Bytes that the engine holds on one rank's device when training a model whose units run in their order, forward and back. A unit that
/// is gathered again right after it was resharded (the last one of forward, unless it stays gathered) may take one slot more, where it is
/// far from the others of its size. Activations, unsharded gradients that autograd
/// holds until their unit is reduced, and optimizer state come on top.
struct MemoryFormula {
  int64_t shards = 0;             ///< sum of shard_bytes
  int64_t cast_shards = 0;        ///< sum of cast_shard_bytes
  int64_t sharded_gradients = 0;  ///< sum of sharded_gradient_bytes; of units that step in backward at most 2 of each size
  int64_t gathered = 0;           ///< slots: every unit that keeps its own, and for each size of the others 2; 1 where nothing is gathered ahead,
                                  ///< or for units that are far apart (three others between them), if nothing is reserved
  int64_t gradients = 0;          ///< slots: likewise for gradient_bytes (gradient_slots in place of 2); none on one rank that does not accumulate
  int64_t staging = 0;            ///< slots through which offloaded memory is copied, at most 2 of each size
  int64_t host = 0;               ///< in the host's memory, not part of total(): sum of host_bytes
  [[nodiscard]] int64_t total() const noexcept { return shards + cast_shards + sharded_gradients + gathered + gradients + staging; }
};

/// The formula for `units` that reshard to the whole shard axis, or not at all (keeps_gathered), in the order in which they are used.
/// With gradient accumulation without synchronisation every unit keeps its gradient buffer: `accumulates`.
[[nodiscard]] FSDPP_API MemoryFormula memory_formula(std::span<const UnitMemory> units, bool accumulates = false);

}  // namespace fsdpp

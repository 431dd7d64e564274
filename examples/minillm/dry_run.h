#pragma once
#include <cstdint>
#include <string>

#include "fsdpp/engine/unit_stats.h"
#include "options.h"

namespace minillm {

/// Bytes on each rank, from sizes alone. Units are the blocks (all alike) and the root (embedding and head).
struct MemoryPlan {
  fsdpp::MemoryFormula engine;      ///< what fsdpp holds: equal to fsdpp::memory_formula of the sharded model
  int64_t optimizer = 0;            ///< AdamW's two moments, fp32, as the shards
  int64_t unsharded_gradients = 0;  ///< before they are reduced, at most
  int64_t activations = 0;          ///< kept for backward: an estimate by the printed formula
  [[nodiscard]] int64_t total() const noexcept { return engine.total() + optimizer + unsharded_gradients + activations; }
};

[[nodiscard]] MemoryPlan memory_plan(const Options& options, int world_size);

/// The text of --dry-run: layout plan of a block and of the root, and the memory formula with its numbers.
[[nodiscard]] std::string dry_run_text(const Options& options, int world_size);

}  // namespace minillm

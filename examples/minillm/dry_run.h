#pragma once
#include <cstdint>
#include <string>

#include "fsdpp/engine/unit_stats.h"
#include "options.h"

namespace minillm {

/// Bytes on each rank, from sizes alone. Units are the blocks (all alike) and the root (embedding and head).
struct MemoryPlan {
  fsdpp::MemoryFormula engine;         ///< what fsdpp holds: equal to fsdpp::memory_formula of the sharded model
  int64_t optimizer = 0;               ///< AdamW's two moments, fp32, as the shards
  int64_t activations = 0;             ///< kept when forward ends, by the printed formula
  int64_t activations_of_a_block = 0;  ///< kept when backward is almost done
  int64_t working = 0;                 ///< besides, while the head and the last block are worked on
  /// Activations go while gradients come: backward is at its largest when it begins or when it ends.
  [[nodiscard]] int64_t total() const noexcept {
    const int64_t begins = activations + working, ends = engine.sharded_gradients + activations_of_a_block;
    return engine.total() - engine.sharded_gradients + optimizer + (begins > ends ? begins : ends);
  }
};

[[nodiscard]] MemoryPlan memory_plan(const Options& options, int world_size);

/// The text of --dry-run: layout plan of a block and of the root, and the memory formula with its numbers.
[[nodiscard]] std::string dry_run_text(const Options& options, int world_size);

}  // namespace minillm

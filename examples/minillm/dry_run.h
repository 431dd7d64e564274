#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "fsdpp/engine/unit_stats.h"
#include "options.h"

namespace minillm {

/// Bytes on each rank, from sizes alone. Units are embedding, blocks (all alike) and head.
struct MemoryPlan {
  fsdpp::MemoryFormula engine;  ///< what fsdpp holds: equal to fsdpp::memory_formula of the sharded model
  int64_t optimizer = 0;        ///< AdamW's two moments, fp32, as the shards
  int64_t libraries = 0;        ///< what cuBLAS keeps for itself on a Hopper GPU
  int64_t activations = 0;      ///< kept when forward reaches the head, by the printed formula
  int64_t head = 0;             ///< besides, for the loss
  int64_t last_block = 0;       ///< besides, when backward begins: gradients up to the last block's, and its working memory
  int64_t last_steps = 0;       ///< when backward ends: all gradients that then exist, activations and working memory
  /// Activations go while gradients come: a step is at its largest at one of three moments.
  [[nodiscard]] int64_t total() const noexcept {
    return engine.total() - engine.sharded_gradients + optimizer + libraries + std::max(activations + std::max(head, last_block), last_steps);
  }
};

[[nodiscard]] MemoryPlan memory_plan(const Options& options, int world_size);

/// The text of --dry-run: layout plan of each kind of unit, and the memory formula with its numbers.
[[nodiscard]] std::string dry_run_text(const Options& options, int world_size);

}  // namespace minillm

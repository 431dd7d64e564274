#pragma once
#include <cstdint>
#include <string>

#include "options.h"

namespace minillm {

/// Bytes on each rank, from sizes alone. Units are the blocks (all alike) and the root (embedding and head).
struct MemoryPlan {
  int64_t parameters = 0;  ///< shards, fp32
  int64_t gradients = 0;   ///< sharded gradients, fp32
  int64_t optimizer = 0;   ///< AdamW's two moments, fp32
  int64_t gathered = 0;    ///< gathered buffers that live at once: the root's and two blocks' (one in use, one gathered ahead)
  int64_t reduction = 0;   ///< gradient buffers that live at once: the root's and two blocks', fp32
  int64_t unsharded_gradients = 0;  ///< of the unit in backward, before they enter the gradient buffer
  int64_t activations = 0; ///< kept for backward: estimate of [layers·16·dim + 4·vocab]·batch·seq elements
  [[nodiscard]] int64_t total() const noexcept {
    return parameters + gradients + optimizer + gathered + reduction + unsharded_gradients + activations;
  }
};

[[nodiscard]] MemoryPlan memory_plan(const Options& options, int world_size);

/// The text of --dry-run: layout plan of a block and of the root, and the memory formula with its numbers.
[[nodiscard]] std::string dry_run_text(const Options& options, int world_size);

}  // namespace minillm

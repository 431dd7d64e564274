#include <algorithm>
#include <limits>
#include <map>

#include "engine/slot_pool.h"
#include "fsdpp/engine/unit_stats.h"

namespace fsdpp {
namespace {

// Bytes of the slots for buffers of these sizes, of which at most `alive` of a size are in use at once.
int64_t slot_bytes(const std::map<int64_t, int>& count_of_size, int alive) {
  int64_t sum = 0;
  for (auto [size, count] : count_of_size) sum += size * std::min(count, alive);
  return sum;
}

}  // namespace

MemoryFormula memory_formula(std::span<const UnitMemory> units, bool accumulates) {
  MemoryFormula m;
  std::map<int64_t, int> gathered, gradients, sharded_gradients, staging;
  int gradient_slots = 1;
  for (auto& u : units) {
    m.shards += u.shard_bytes;
    m.cast_shards += u.cast_shard_bytes;
    if (u.steps_in_backward)
      ++sharded_gradients[u.sharded_gradient_bytes];
    else
      m.sharded_gradients += u.sharded_gradient_bytes;
    m.host += u.host_bytes;
    ++staging[u.staging_bytes];
    ++staging[u.gradient_staging_bytes];
    gradient_slots = std::max(gradient_slots, u.gradient_slots);
    if (u.keeps_gathered)
      m.gathered += u.gathered_bytes;
    else
      ++gathered[u.gathered_bytes];
    if (u.reduces_on_wire || accumulates) ++gradients[u.gradient_bytes];
  }
  m.sharded_gradients += slot_bytes(sharded_gradients, engine::SlotPool::kSlots);
  m.gathered += slot_bytes(gathered, engine::SlotPool::kSlots);
  m.gradients = slot_bytes(gradients, accumulates ? std::numeric_limits<int>::max() : gradient_slots);
  m.staging = slot_bytes(staging, engine::SlotPool::kSlots);
  return m;
}

}  // namespace fsdpp

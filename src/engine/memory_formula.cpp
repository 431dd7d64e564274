#include <algorithm>
#include <map>

#include "engine/slot_pool.h"
#include "fsdpp/engine/unit_stats.h"

namespace fsdpp {
namespace {

// Bytes of the slots for buffers of these sizes: two of a size are enough, since at most two are alive at once.
int64_t slot_bytes(const std::map<int64_t, int>& count_of_size, bool all_alive) {
  int64_t sum = 0;
  for (auto [size, count] : count_of_size) sum += size * (all_alive ? count : std::min(count, engine::SlotPool::kSlots));
  return sum;
}

}  // namespace

MemoryFormula memory_formula(std::span<const UnitMemory> units, bool accumulates) {
  MemoryFormula m;
  std::map<int64_t, int> gathered, gradients;
  for (auto& u : units) {
    m.shards += u.shard_bytes;
    m.sharded_gradients += u.sharded_gradient_bytes;
    if (u.keeps_gathered)
      m.gathered += u.gathered_bytes;
    else
      ++gathered[u.gathered_bytes];
    if (u.reduces_on_wire || accumulates) ++gradients[u.gradient_bytes];
  }
  m.gathered += slot_bytes(gathered, false);
  m.gradients = slot_bytes(gradients, accumulates);
  return m;
}

}  // namespace fsdpp

#include <algorithm>
#include <map>
#include <optional>

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

// Units in their order that take slots of one size. Units with so few others between them are in each other's way: a slot is not free yet,
// or not long enough (SlotPool::kLongAgo), when the next is gathered ahead.
constexpr int kNear = static_cast<int>(engine::SlotPool::kLongAgo) + 1;

struct SlotUse {
  int kept = 0, passing = 0;
  int alone = 0, in_ring = 0;  ///< slots at once: one for each kept so far and the unit itself; and those in use or too recent besides
  bool near = false, reserved = false;
  std::optional<int> last_passing;
  void add(int place, bool keeps, bool reserves) {
    reserved = reserved || reserves;
    const bool follows = last_passing && place - *last_passing <= kNear;
    near = near || follows;
    alone = std::max(alone, kept + 1);
    in_ring = std::max(in_ring, kept + (follows ? engine::SlotPool::kSlots : 1));
    ++(keeps ? kept : passing);
    if (!keeps) last_passing = place;
  }
  [[nodiscard]] int gathered(bool ahead) const {
    if (reserved) return kept + std::min(passing, engine::SlotPool::kSlots);
    return ahead ? in_ring : alone;
  }
  [[nodiscard]] int gradients(bool accumulates, int at_once) const {
    if (accumulates) return kept + passing;
    return kept + std::min(passing, near || reserved ? at_once : 1);
  }
};

}  // namespace

MemoryFormula memory_formula(std::span<const UnitMemory> units, bool accumulates) {
  MemoryFormula m;
  std::map<int64_t, int> sharded_gradients, staging;
  std::map<int64_t, SlotUse> gathered, gradients;
  int gradient_slots = 1, place = 0;
  bool ahead = false;
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
    gathered[u.gathered_bytes].add(place, u.keeps_gathered, u.reserves_slots);
    if (u.reduces_on_wire || accumulates) gradients[u.gradient_bytes].add(place, u.holds_gradient, u.reserves_slots);
    ahead = ahead || u.gathers_ahead;
    ++place;
  }
  m.sharded_gradients += slot_bytes(sharded_gradients, engine::SlotPool::kSlots);
  for (auto& [size, use] : gathered) m.gathered += size * use.gathered(ahead);
  for (auto& [size, use] : gradients) m.gradients += size * use.gradients(accumulates, gradient_slots);
  m.staging = slot_bytes(staging, engine::SlotPool::kSlots);
  return m;
}

}  // namespace fsdpp

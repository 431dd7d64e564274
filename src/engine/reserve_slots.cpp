// Symmetric buffers are made by all ranks together, before ranks can come to them in different orders.
#include <algorithm>
#include <map>

#include "engine/comm_context.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

/// Buffers of one size: those that are kept beside all others, those that take turns, and how many of those are of one unit, at most.
struct Demand {
  int kept = 0, in_turn = 0, of_a_unit = 0;
  [[nodiscard]] int slots(int units_at_once) const { return kept + std::min(in_turn, units_at_once * of_a_unit); }
};
using Demands = std::map<int64_t, Demand>;

void add(Demands& demands, const std::map<int64_t, int>& count_of_size, bool keeps) {
  for (const auto& [bytes, count] : count_of_size) {
    auto& demand = demands[bytes];
    (keeps ? demand.kept : demand.in_turn) += count;
    if (!keeps) demand.of_a_unit = std::max(demand.of_a_unit, count);
  }
}

// As memory_formula counts: gathered while other units inside it run.
bool keeps_gathered(Unit& unit, bool is_root) {
  return unit.memory(is_root).keeps_gathered || (unit.module() && find_units(*unit.module()).size() > 1);
}

}  // namespace

void CommContext::reserve_slots(const std::vector<Unit*>& units) {
  if (!symmetric_buffers()) return;
  Demands gathered, gradients;
  for (auto* unit : units) {
    if (&unit->context() != this) continue;
    std::map<int64_t, int> own_gathered, own_gradients;
    for (auto& b : unit->buffers()) {
      if (b->gathered_bytes() == 0) continue;
      ++own_gathered[gathered_pool_.rounded(b->gathered_bytes())];
      if (b->trains() && c10::isFloatingType(b->config().dtype)) ++own_gradients[gradient_pool_.rounded(b->gradient_bytes())];
    }
    add(gathered, own_gathered, keeps_gathered(*unit, unit == units.front()));
    add(gradients, own_gradients, unit->reduces_unused());  // holds it until all ranks reduce
  }
  for (auto& [bytes, demand] : gathered) gathered_pool_.reserve(bytes, demand.slots(SlotPool::kSlots));
  for (auto& [bytes, demand] : gradients) gradient_pool_.reserve(bytes, demand.slots(reduce_buffers_));
  slots_reserved_ = true;
}

}  // namespace fsdpp::engine

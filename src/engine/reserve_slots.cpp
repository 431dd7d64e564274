// Symmetric buffers are made by all ranks together, before ranks can come to them in different orders.
#include <algorithm>
#include <map>

#include "engine/comm_context.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

/// Buffers of one size: those that are kept beside all others, and those that take turns.
struct Demand {
  int kept = 0, in_turn = 0;
};

// As memory_formula counts: gathered while other units inside it run.
bool keeps_gathered(Unit& unit, bool is_root) {
  return unit.memory(is_root).keeps_gathered || (unit.module() && find_units(*unit.module()).size() > 1);
}

}  // namespace

void CommContext::reserve_slots(const std::vector<Unit*>& units) {
  if (!symmetric_buffers()) return;
  std::map<int64_t, Demand> gathered, gradients;
  for (auto* unit : units) {
    if (&unit->context() != this) continue;
    const bool keeps = keeps_gathered(*unit, unit == units.front());
    for (auto& b : unit->buffers()) {
      if (b->gathered_bytes() == 0) continue;
      auto& demand = gathered[gathered_pool_.rounded(b->gathered_bytes())];
      ++(keeps ? demand.kept : demand.in_turn);
      if (b->trains() && c10::isFloatingType(b->config().dtype)) ++gradients[gradient_pool_.rounded(b->gradient_bytes())].in_turn;
    }
  }
  for (auto& [bytes, demand] : gathered) gathered_pool_.reserve(bytes, demand.kept + std::min(demand.in_turn, SlotPool::kSlots));
  for (auto& [bytes, demand] : gradients) gradient_pool_.reserve(bytes, std::min(demand.in_turn, reduce_buffers_));
}

}  // namespace fsdpp::engine

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "base/enforce.h"
#include "fsdpp/profiler/chrome_trace.h"

namespace fsdpp::profiler {
namespace {

/// Removes what `stays` refuses. Returns the new index of each item, or -1.
template <class Item>
std::vector<int> keep(std::vector<Item>& items, const auto& stays) {
  std::vector<int> index(items.size(), -1);
  size_t next = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!stays(items[i])) continue;
    index[i] = static_cast<int>(next);
    if (next != i) items[next] = std::move(items[i]);
    ++next;
  }
  items.resize(next);
  return index;
}

void renumber(int& index, const std::vector<int>& to) {
  if (index >= 0) index = to[static_cast<size_t>(index)];
}

struct Cutter {
  Trace& t;
  int64_t from, to;
  std::unordered_set<int64_t> all_calls{}, calls{};

  [[nodiscard]] bool inside(int64_t time) const { return time >= from && time < to; }
  /// By its launch if that is known, for the device may run far behind.
  [[nodiscard]] bool launched_inside(int64_t correlation, int64_t start) const {
    return all_calls.contains(correlation) ? calls.contains(correlation) : inside(start);
  }

  void cut() {
    for (const Runtime& r : t.runtime) all_calls.insert(r.correlation);
    const auto starts = [this](const auto& item) { return inside(item.start_ns); };
    const auto launched = [this](const auto& item) { return launched_inside(item.correlation, item.start_ns); };
    keep(t.runtime, starts);
    for (const Runtime& r : t.runtime) calls.insert(r.correlation);
    const auto ops = keep(t.cpu_ops, starts), scopes = keep(t.scopes, starts), kernels = keep(t.kernels, launched);
    keep(t.copies, launched);
    keep(t.syncs, starts);
    keep(t.events, [this](const EventRecord& e) { return calls.contains(e.correlation); });
    keep(t.overheads, starts);
    keep(t.memory, [this](const MemoryEvent& e) { return inside(e.time_ns); });
    keep(t.collectives, [this](const Collective& c) { return inside(c.issued_ns); });
    keep(t.steps, [this](const StepMark& s) { return s.start_ns == from; });
    for (CpuOp& op : t.cpu_ops) renumber(op.parent, ops);
    for (Scope& scope : t.scopes) renumber(scope.parent, scopes);
    for (Collective& c : t.collectives) renumber(c.kernel, kernels), renumber(c.scope, scopes);
    const auto placed = [&](auto& items) {
      for (auto& item : items) renumber(item.op, ops), renumber(item.scope, scopes);
    };
    placed(t.kernels), placed(t.copies), placed(t.runtime), placed(t.memory);
    for (CpuOp& op : t.cpu_ops) renumber(op.scope, scopes);
    t.start_ns = from;
    t.end_ns = to;
    for (const Kernel& k : t.kernels) t.end_ns = std::max(t.end_ns, k.end_ns);
    for (const Copy& c : t.copies) t.end_ns = std::max(t.end_ns, c.end_ns);
  }
};

}  // namespace

Trace cut_to_step(Trace trace, int64_t step) {
  const auto mark =
      std::find_if(trace.steps.begin(), trace.steps.end(), [&](const StepMark& s) { return s.step == step; });
  FSDPP_ENFORCE(mark != trace.steps.end(), UsageError, "cut_to_step: expected a step of the trace, got {}", step);
  Cutter{trace, mark->start_ns, mark->end_ns}.cut();
  return trace;
}

}  // namespace fsdpp::profiler

#include "profiler/place.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "profiler/assemble.h"

namespace fsdpp::profiler {
namespace {

using trace::Kind;

/// A kernel or copy of the collective, by its launch.
struct DeviceWork {
  int64_t launch_ns, start_ns, end_ns;
  int device, stream, kernel;
};

std::map<int64_t, std::vector<DeviceWork>> work_by_thread(const Trace& trace) {
  std::unordered_map<int64_t, const Runtime*> launch_of;
  for (const Runtime& call : trace.runtime) launch_of.try_emplace(call.correlation, &call);
  std::map<int64_t, std::vector<DeviceWork>> threads;
  const auto add = [&](const auto& work, int kernel) {
    const auto call = launch_of.find(work.correlation);
    if (call == launch_of.end() || work.graph_node_id != 0) return;
    threads[call->second->thread].push_back({call->second->start_ns, work.start_ns, work.end_ns, work.device, work.stream, kernel});
  };
  for (size_t i = 0; i < trace.kernels.size(); ++i) add(trace.kernels[i], static_cast<int>(i));
  for (const Copy& copy : trace.copies) add(copy, -1);
  for (auto& [thread, work] : threads)
    std::sort(work.begin(), work.end(), [](const auto& a, const auto& b) { return a.launch_ns < b.launch_ns; });
  return threads;
}

void set_device_times(Collective& c, const std::vector<DeviceWork>& work, int64_t from, int64_t to) {
  auto at = std::lower_bound(work.begin(), work.end(), from, [](const DeviceWork& w, int64_t t) { return w.launch_ns < t; });
  for (; at != work.end() && at->launch_ns < to; ++at) {
    if (at->start_ns == 0) continue;
    c.start_ns = c.on_device ? std::min(c.start_ns, at->start_ns) : at->start_ns;
    c.end_ns = c.on_device ? std::max(c.end_ns, at->end_ns) : at->end_ns;
    c.on_device = true;
    c.device = at->device;
    c.stream = at->stream;
    if (c.kernel < 0) c.kernel = at->kernel;
  }
}

MemoryEvent::Category category_of(const Trace& trace, const MemoryEvent& event) {
  using Category = MemoryEvent::Category;
  const bool backward = event.op >= 0 && trace.cpu_ops[event.op].category == CpuOp::Category::Backward;
  if (event.scope < 0) return backward ? Category::Gradients : Category::Other;
  switch (trace.scopes[event.scope].kind) {
    case Kind::Unshard: return Category::Gathered;
    case Kind::Reduce:
    case Kind::PostBackward: return Category::Gradients;
    case Kind::Optimizer: return Category::Optimizer;
    case Kind::Forward:
    case Kind::Backward: return Category::Activations;  // in backward: their gradients
    default: return backward ? Category::Gradients : Category::Other;
  }
}

}  // namespace

std::vector<Scope> unit_spans(const std::vector<Scope>& scopes) {
  std::vector<const Scope*> order;
  for (const Scope& scope : scopes) order.push_back(&scope);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->start_ns < b->start_ns; });
  std::map<std::pair<bool, std::string>, const Scope*> open;  // backward?, unit
  std::vector<Scope> spans;
  for (const Scope* scope : order) {
    const bool backward = scope->kind == Kind::PreBackward || scope->kind == Kind::PostBackward;
    if (scope->kind == Kind::PreForward || scope->kind == Kind::PreBackward) {
      open[{backward, scope->name}] = scope;
    } else if (scope->kind == Kind::PostForward || scope->kind == Kind::PostBackward) {
      const auto from = open.find({backward, scope->name});
      if (from == open.end()) continue;
      Scope span = *from->second;
      span.kind = backward ? Kind::Backward : Kind::Forward;
      span.end_ns = scope->end_ns;
      span.bytes = 0;
      span.parent = -1;
      spans.push_back(std::move(span));
      open.erase(from);
    }
  }
  return spans;
}

Places::Places(Trace& trace) : trace_(trace), ops_(trace.cpu_ops), scopes_(trace.scopes) {
  for (size_t i = 0; i < trace.scopes.size(); ++i) trace.scopes[i].parent = scopes_.parents()[i];
  for (Scope& span : unit_spans(trace.scopes)) {
    span.parent = scopes_.innermost(span.thread, span.start_ns - 1);
    spans_.push_back({span.start_ns, span.end_ns, span.thread, static_cast<int>(trace.scopes.size())});
    trace.scopes.push_back(std::move(span));
  }
  std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.start < b.start; });
}

int Places::scope(int64_t thread, int64_t time) const {
  const int opened = scopes_.innermost(thread, time);
  const auto after = std::upper_bound(spans_.begin(), spans_.end(), time, [](int64_t t, const Span& s) { return t < s.start; });
  for (auto at = after; at != spans_.begin();) {
    --at;
    if (opened >= 0 && trace_.scopes[opened].start_ns >= at->start) break;  // the opened one is further inside
    if (at->thread == thread && time < at->end) return at->scope;
  }
  return opened;
}

void place_collectives(Trace& trace, std::vector<RawCollective> raw, const Places& places) {
  const auto work = work_by_thread(trace);
  std::stable_sort(raw.begin(), raw.end(), [](const auto& a, const auto& b) { return a.collective.issued_ns < b.collective.issued_ns; });
  std::map<int64_t, std::vector<size_t>> waiting;  // thread, members of its open group
  for (RawCollective& r : raw) {
    Collective& c = r.collective;
    const auto mine = work.find(c.thread);
    const int64_t returned = c.end_ns;
    auto& group = waiting[c.thread];
    if (c.sequence < 0 && c.op == "group") {
      for (const size_t member : group)
        if (mine != work.end()) set_device_times(trace.collectives[member], mine->second, c.issued_ns, returned);
      group.clear();
      continue;
    }
    c.scope = places.scope(c.thread, c.issued_ns);
    if (!r.in_group && mine != work.end()) set_device_times(c, mine->second, c.issued_ns, returned);
    if (r.in_group) group.push_back(trace.collectives.size());
    trace.collectives.push_back(std::move(c));
  }
}

void place_memory(Trace& trace, const Places& places) {
  std::unordered_map<uint64_t, MemoryEvent::Category> taken;
  for (MemoryEvent& event : trace.memory) {
    if (event.before) {
      taken[event.address] = event.category;
      continue;
    }
    event.op = places.op(event.thread, event.time_ns);
    event.scope = places.scope(event.thread, event.time_ns);
    const auto known = taken.find(event.address);
    if (event.bytes < 0 && known != taken.end()) {
      event.category = known->second;
      taken.erase(known);
    } else if (event.category == MemoryEvent::Category::Other) {
      event.category = category_of(trace, event);
    }
    if (event.bytes > 0) taken[event.address] = event.category;
    if (event.op < 0) continue;
    (event.device < 0 ? trace.cpu_ops[event.op].bytes : trace.cpu_ops[event.op].device_bytes) += event.bytes;
  }
}

}  // namespace fsdpp::profiler

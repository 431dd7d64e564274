#include "profiler/assemble.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "profiler/intervals.h"
#include "profiler/op_args.h"
#include "profiler/place.h"

namespace fsdpp::profiler {
namespace {

/// Closes what was open when the window ended.
template <class Item>
void close_open(std::vector<Item>& items, const RecordedWindow& window, Audit& audit) {
  for (Item& item : items) {
    if (item.end_ns != 0) continue;
    item.end_ns = std::max(window.end_ns, item.start_ns);
    ++audit.cut_by_window;
  }
}

CpuOp to_op(RawOp& raw, const ThreadRecords& from, const RecordedWindow& window) {
  CpuOp op;
  op.name = std::move(raw.name);
  op.start_ns = raw.start_ns;
  op.end_ns = raw.end_ns;
  op.thread = from.thread;
  op.sequence = raw.sequence;
  op.forward_thread = raw.forward_thread;
  op.category = raw.category;
  if (raw.args_begin == raw.args_end || raw.args_end > from.args.size()) return op;
  const auto args = read_args(std::span(from.args).subspan(raw.args_begin, raw.args_end - raw.args_begin));
  if (window.with_flops) op.flops = flops_of(op.name, args);
  if (window.record_shapes) {
    op.shapes = shapes_text(args);
    op.dtypes = dtypes_text(args);
  }
  return op;
}

template <class Item>
void append(std::vector<Item>& to, std::vector<Item>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

/// Ahead of the first allocation, for a sort by time that keeps equals in order.
void take_known_memory(Trace& trace, const RecordedWindow& window) {
  for (MemoryEvent event : window.known_memory) {
    event.time_ns = window.start_ns;
    event.before = true;
    trace.memory.push_back(event);
  }
}

void take_host(Trace& trace, HostRecords& host, const RecordedWindow& window, std::vector<RawCollective>& collectives) {
  take_known_memory(trace, window);
  for (ThreadRecords& from : host) {
    close_open(from.ops, window, trace.audit);
    close_open(from.scopes, window, trace.audit);
    for (RawOp& raw : from.ops) trace.cpu_ops.push_back(to_op(raw, from, window));
    append(trace.scopes, from.scopes);
    append(trace.memory, from.memory);
    for (RawCollective& raw : from.collectives) {
      if (raw.collective.end_ns == 0) raw.collective.end_ns = window.end_ns;
      collectives.push_back(std::move(raw));
    }
  }
  for (size_t i = 0; i < trace.cpu_ops.size(); ++i) trace.cpu_ops[i].id = i + 1;
  std::stable_sort(trace.memory.begin(), trace.memory.end(), [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; });
}

void take_device(Trace& trace, DeviceRecords& device) {
  trace.has_cuda = device.available;
  trace.cupti_version = device.cupti_version;
  trace.cuda_runtime_version = device.runtime_version;
  trace.cuda_driver_version = device.driver_version;
  trace.devices = std::move(device.devices);
  trace.kernels = std::move(device.kernels);
  trace.copies = std::move(device.copies);
  trace.runtime = std::move(device.runtime);
  trace.syncs = std::move(device.syncs);
  trace.events = std::move(device.events);
  trace.overheads = std::move(device.overheads);
  Audit& audit = trace.audit;
  audit.truncated_buffers = device.truncated_buffers;
  audit.refused_buffers = device.refused_buffers;
  audit.dropped_records = device.dropped_records;
  audit.cupti_errors = static_cast<int64_t>(device.errors.size());
  for (const auto& [kind, count] : device.unknown_kinds) {
    audit.unknown_records += count;
    audit.notes.push_back(std::to_string(count) + " records of unknown kind " + std::to_string(kind));
  }
  for (const std::string& error : device.errors) audit.errors.push_back(error);
  for (const std::string& note : device.notes) audit.notes.push_back(note);
}

/// Device records of work that was over before the window began, or that claim to be later than its end.
void drop_outside(Trace& trace) {
  constexpr int64_t kSlack = 1'000'000;  // clocks of host and device agree to less
  const auto outside = [&](const auto& r) {
    if (r.start_ns == 0 && r.end_ns == 0) return false;  // not timed: the audit's business
    return r.end_ns < trace.start_ns - kSlack || r.start_ns > trace.end_ns + kSlack;
  };
  trace.audit.outside_window += static_cast<int64_t>(std::erase_if(trace.kernels, outside));
  trace.audit.outside_window += static_cast<int64_t>(std::erase_if(trace.copies, outside));
  std::erase_if(trace.runtime, outside);
}

void place_ops(Trace& trace, const Places& places) {
  const auto& parents = places.op_parents();
  for (size_t i = 0; i < trace.cpu_ops.size(); ++i) {
    CpuOp& op = trace.cpu_ops[i];
    op.parent = parents[i];
    op.scope = places.scope(op.thread, op.start_ns);
  }
  // Flops of an operator stand for those of the operators inside it. Parents may come after their children.
  std::vector<bool> covered(trace.cpu_ops.size());
  for (size_t i = 0; i < trace.cpu_ops.size(); ++i)
    for (int up = parents[i]; up >= 0 && !covered[i]; up = parents[up]) covered[i] = trace.cpu_ops[up].flops > 0;
  for (size_t i = 0; i < trace.cpu_ops.size(); ++i)
    if (covered[i]) trace.cpu_ops[i].flops = 0;
}

void place_launches(Trace& trace, const Places& places, const std::vector<GraphNode>& nodes) {
  IntervalIndex launches(trace.runtime);
  for (Runtime& call : trace.runtime) {
    call.op = places.op(call.thread, call.start_ns);
    call.scope = places.scope(call.thread, call.start_ns);
  }
  // A launch into a capture makes a node, not a kernel; a driver launch inside one of the runtime is the same launch.
  for (const GraphNode& node : nodes)
    if (const int call = node.origin == 0 ? launches.innermost(node.thread, node.time_ns) : -1; call >= 0)
      for (int up = call; up >= 0; up = launches.parents()[up]) trace.runtime[up].launch = false;
  for (size_t i = 0; i < trace.runtime.size(); ++i)
    if (const int up = launches.parents()[i]; up >= 0 && trace.runtime[up].launch) trace.runtime[i].launch = false;
}

/// Where each graph node was captured.
std::unordered_map<uint64_t, const GraphNode*> captures(const std::vector<GraphNode>& nodes) {
  std::unordered_map<uint64_t, const GraphNode*> by_id, captured;
  for (const GraphNode& node : nodes) by_id[node.id] = &node;
  for (const GraphNode& node : nodes) {
    const GraphNode* first = &node;
    for (int hops = 0; first->origin != 0 && hops < 8; ++hops) {
      const auto up = by_id.find(first->origin);
      if (up == by_id.end()) break;
      first = up->second;
    }
    if (first->origin == 0) captured[node.id] = first;
  }
  return captured;
}

void place_device_work(Trace& trace, const Places& places, const std::vector<GraphNode>& nodes) {
  std::unordered_map<int64_t, int> launch_of;
  for (size_t i = 0; i < trace.runtime.size(); ++i) {
    const auto [at, fresh] = launch_of.try_emplace(trace.runtime[i].correlation, static_cast<int>(i));
    if (!fresh && !trace.runtime[i].driver) at->second = static_cast<int>(i);
  }
  const auto captured = captures(nodes);
  const auto place = [&](auto& work) {
    if (work.graph_node_id != 0) {
      const auto node = captured.find(static_cast<uint64_t>(work.graph_node_id));
      if (node == captured.end()) return;
      work.op = places.op(node->second->thread, node->second->time_ns);
      work.scope = places.scope(node->second->thread, node->second->time_ns);
    } else if (const auto launch = launch_of.find(work.correlation); launch != launch_of.end()) {
      work.op = trace.runtime[launch->second].op;
      work.scope = trace.runtime[launch->second].scope;
    }
  };
  for (Kernel& kernel : trace.kernels) place(kernel);
  for (Copy& copy : trace.copies) place(copy);
}

}  // namespace

Trace assemble(HostRecords host, DeviceRecords device, const RecordedWindow& window) {
  Trace trace;
  trace.start_ns = window.start_ns;
  trace.end_ns = window.end_ns;
  trace.record_shapes = window.record_shapes;
  trace.profile_memory = window.profile_memory;
  trace.with_flops = window.with_flops;
  trace.steps = window.steps;
  trace.audit.clock_shift_ns = window.clock_shift_ns;
  const std::vector<GraphNode> nodes = std::move(device.graph_nodes);
  std::vector<RawCollective> collectives;
  take_host(trace, host, window, collectives);
  take_device(trace, device);
  drop_outside(trace);
  const Places places(trace);
  place_ops(trace, places);
  place_launches(trace, places, nodes);
  place_device_work(trace, places, nodes);
  place_collectives(trace, std::move(collectives), places);
  place_memory(trace, places);
  audit(trace);
  return trace;
}

}  // namespace fsdpp::profiler

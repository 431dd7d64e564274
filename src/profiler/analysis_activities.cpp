#include <algorithm>
#include <map>
#include <unordered_map>

#include "fsdpp/profiler/analysis.h"
#include "profiler/analysis_intervals.h"

namespace fsdpp::profiler {
namespace {

bool cut(Work& a, Window window) {
  a.start_ns = std::max(a.start_ns, window.start_ns);
  a.end_ns = std::min(a.end_ns, window.end_ns);
  return a.start_ns < a.end_ns;
}

/// The name of the innermost scope that has one.
std::string scope_name(const Trace& trace, int scope) {
  for (; scope >= 0; scope = trace.scopes[scope].parent) {
    if (!trace.scopes[scope].name.empty()) return trace.scopes[scope].name;
  }
  return "(no unit)";
}

std::string unit_of(const Trace& trace, const Collective& c) {
  return c.label.empty() ? scope_name(trace, c.scope) : c.label;
}

std::unordered_map<int, int> collectives_by_kernel(const Trace& trace) {
  std::unordered_map<int, int> out;
  for (size_t i = 0; i < trace.collectives.size(); ++i) {
    if (trace.collectives[i].kernel >= 0) out.emplace(trace.collectives[i].kernel, static_cast<int>(i));
  }
  return out;
}

Work kernel_activity(const Trace& trace, int index, const std::unordered_map<int, int>& collectives) {
  const Kernel& k = trace.kernels[index];
  Work a{Work::Kind::Compute, k.start_ns, k.end_ns, k.stream, k.correlation, index, -1, k.op, "", k.name};
  if (const auto it = collectives.find(index); it != collectives.end()) {
    const Collective& c = trace.collectives[it->second];
    a.kind = Work::Kind::Communication;
    a.collective = it->second;
    a.unit = unit_of(trace, c);
    a.what = c.op;
  } else if (k.name.starts_with("nccl")) {
    a.kind = Work::Kind::Communication;
    a.unit = scope_name(trace, k.scope);
  }
  return a;
}

Work collective_activity(const Trace& trace, int index) {
  const Collective& c = trace.collectives[index];
  return {Work::Kind::Communication, c.start_ns, c.end_ns, c.stream, 0, -1, index, -1, unit_of(trace, c), c.op};
}

void add_device(const Trace& trace, int device, std::vector<Work>& out) {
  const auto collectives = collectives_by_kernel(trace);
  for (size_t i = 0; i < trace.kernels.size(); ++i) {
    if (trace.kernels[i].device == device && trace.kernels[i].start_ns > 0) {
      out.push_back(kernel_activity(trace, static_cast<int>(i), collectives));
    }
  }
  for (size_t i = 0; i < trace.collectives.size(); ++i) {
    const Collective& c = trace.collectives[i];
    if (c.on_device && c.kernel < 0 && c.device == device && c.start_ns > 0) {
      out.push_back(collective_activity(trace, static_cast<int>(i)));
    }
  }
  for (const Copy& c : trace.copies) {
    if (c.device != device || c.start_ns <= 0) continue;
    out.push_back({Work::Kind::Copy, c.start_ns, c.end_ns, c.stream, c.correlation, -1, -1, c.op, "", "copy"});
  }
}

/// Without a GPU: a thread computes while an operator is open and no collective of its own blocks it.
void add_host(const Trace& trace, std::vector<Work>& out) {
  std::map<int64_t, Intervals> ops, waits;
  for (const CpuOp& op : trace.cpu_ops) {
    if (op.category != CpuOp::Category::User) ops[op.thread].push_back({op.start_ns, op.end_ns});
  }
  for (size_t i = 0; i < trace.collectives.size(); ++i) {
    const Collective& c = trace.collectives[i];
    if (c.on_device || c.start_ns <= 0) continue;
    waits[c.thread].push_back({c.start_ns, c.end_ns});
    out.push_back(collective_activity(trace, static_cast<int>(i)));
  }
  for (auto& [thread, intervals] : ops) {
    for (const Interval& i : subtract(merged(std::move(intervals)), merged(waits[thread]))) {
      Work a;
      a.start_ns = i.start;
      a.end_ns = i.end;
      a.what = "operators";
      out.push_back(std::move(a));
    }
  }
}

}  // namespace

int main_device(const Trace& trace) {
  std::map<int, int64_t> time;
  for (const Kernel& k : trace.kernels) time[k.device] += std::max<int64_t>(k.end_ns - k.start_ns, 0);
  const auto most = std::max_element(time.begin(), time.end(), [](auto& a, auto& b) { return a.second < b.second; });
  return most == time.end() ? kHostDevice : most->first;
}

std::vector<Work> device_activities(const Trace& trace, int device, Window window) {
  std::vector<Work> out;
  device == kHostDevice ? add_host(trace, out) : add_device(trace, device, out);
  std::erase_if(out, [&](Work& a) { return !cut(a, window); });
  std::stable_sort(out.begin(), out.end(), [](const Work& a, const Work& b) { return a.start_ns < b.start_ns; });
  return out;
}

}  // namespace fsdpp::profiler

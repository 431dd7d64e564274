#pragma once
#include <string>

#include "fsdpp/profiler/analysis.h"

/// Hand-made schedules. Times are small numbers after kBase, so that expected values can be read off.
namespace fsdpp::profiler::testing {

inline constexpr int64_t kBase = 1'700'000'000'000'000'000;
inline constexpr int64_t kMainThread = 100;

class Schedule {
 public:
  Schedule(int64_t start, int64_t end) {
    trace.start_ns = kBase + start;
    trace.end_ns = kBase + end;
    trace.has_cuda = true;
  }
  /// A kernel launched by a call [launch, launch + 2); launch < 0: no launch record.
  int kernel(const std::string& name, int64_t start, int64_t end, int64_t launch = -1, int stream = 7) {
    Kernel k;
    k.name = name;
    k.start_ns = kBase + start;
    k.end_ns = kBase + end;
    k.stream = stream;
    k.correlation = ++correlation_;
    if (launch >= 0) call("cudaLaunchKernel", launch, launch + 2, correlation_, true);
    trace.kernels.push_back(k);
    return static_cast<int>(trace.kernels.size()) - 1;
  }
  void call(const std::string& name, int64_t start, int64_t end, int64_t correlation = 0, bool launch = false) {
    Runtime r;
    r.name = name;
    r.start_ns = kBase + start;
    r.end_ns = kBase + end;
    r.thread = kMainThread;
    r.correlation = correlation != 0 ? correlation : ++correlation_;
    r.launch = launch;
    trace.runtime.push_back(r);
  }
  Collective& collective(const std::string& op, const std::string& label, int kernel, int64_t bytes = 0) {
    Collective c;
    c.op = op;
    c.label = label;
    c.kernel = kernel;
    c.bytes = bytes;
    c.device = 0;
    c.on_device = true;
    c.thread = kMainThread;
    if (kernel >= 0) {
      c.start_ns = trace.kernels[kernel].start_ns;
      c.end_ns = trace.kernels[kernel].end_ns;
    }
    trace.collectives.push_back(c);
    return trace.collectives.back();
  }
  void gather(const std::string& unit, int64_t start, int64_t end, int64_t launch = -1) {
    collective("all_gather", unit, kernel("ncclDevKernel_AllGather_RING_LL", start, end, launch, 20), 1024);
  }
  void copy(int64_t start, int64_t end) {
    Copy c;
    c.start_ns = kBase + start;
    c.end_ns = kBase + end;
    trace.copies.push_back(c);
  }
  int scope(trace::Kind kind, const std::string& name, int64_t start, int64_t end, int64_t thread = kMainThread) {
    Scope s;
    s.kind = kind;
    s.name = name;
    s.start_ns = kBase + start;
    s.end_ns = kBase + end;
    s.thread = thread;
    trace.scopes.push_back(s);
    return static_cast<int>(trace.scopes.size()) - 1;
  }
  int op(const std::string& name, int64_t start, int64_t end, int parent = -1) {
    CpuOp o;
    o.name = name;
    o.start_ns = kBase + start;
    o.end_ns = kBase + end;
    o.thread = kMainThread;
    o.parent = parent;
    trace.cpu_ops.push_back(o);
    return static_cast<int>(trace.cpu_ops.size()) - 1;
  }
  void overhead(const std::string& kind, int64_t start, int64_t end) {
    trace.overheads.push_back({kind, kBase + start, kBase + end, kMainThread});
  }
  void step(int64_t number, int64_t start, int64_t end) {
    trace.steps.push_back({number, kBase + start, kBase + end, kMainThread});
  }
  void memory(int64_t time, uint64_t address, int64_t bytes, MemoryEvent::Category category, int scope = -1,
              int64_t total = 0) {
    MemoryEvent e;
    e.time_ns = kBase + time;
    e.address = address;
    e.bytes = bytes;
    e.total_bytes = total != 0 ? total : bytes;
    e.device = 0;
    e.category = category;
    e.scope = scope;
    trace.memory.push_back(e);
  }
  [[nodiscard]] Analysis analysis() const { return analyse(trace); }

  Trace trace;

 private:
  int64_t correlation_ = 0;
};

inline int64_t idle(const Analysis& a, IdleCause cause) { return a.idle_ns[static_cast<size_t>(cause)]; }

}  // namespace fsdpp::profiler::testing

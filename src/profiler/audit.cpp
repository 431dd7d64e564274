#include <cstdlib>
#include <unordered_map>
#include <unordered_set>

#include "profiler/assemble.h"

namespace fsdpp::profiler {
namespace {

/// A count with the names of its first cases.
class Finding {
 public:
  void add(const std::string& name) {
    if (count_++ < 3) names_ += (names_.empty() ? "" : ", ") + name;
  }
  [[nodiscard]] int64_t count() const { return count_; }
  void note(std::vector<std::string>& notes, const std::string& what) const {
    if (count_ > 0) notes.push_back(std::to_string(count_) + " " + what + ": " + names_ + (count_ > 3 ? ", …" : ""));
  }

 private:
  int64_t count_ = 0;
  std::string names_;
};

template <class Work>
void check_stamps(const std::vector<Work>& work, const auto& name, Finding& zero, Finding& reversed) {
  for (const Work& w : work) {
    if (w.start_ns == 0 || w.end_ns == 0)
      zero.add(name(w));
    else if (w.end_ns < w.start_ns)
      reversed.add(name(w));
  }
}

void audit_stamps(Trace& trace) {
  Finding zero, reversed;
  check_stamps(trace.kernels, [](const Kernel& k) { return k.name; }, zero, reversed);
  check_stamps(trace.copies, [](const Copy& c) { return c.kind == Copy::Kind::Memset ? "memset" : "memcpy"; }, zero, reversed);
  trace.audit.zero_stamps = zero.count();
  trace.audit.reversed_stamps = reversed.count();
  zero.note(trace.audit.notes, "device records without times (the device had no memory left for them)");
  reversed.note(trace.audit.notes, "device records that end before they start");
}

void audit_launches(Trace& trace) {
  Audit& audit = trace.audit;
  std::unordered_map<int64_t, const Runtime*> launches;
  std::unordered_set<int64_t> calls;
  Finding unlaunched, lost, early, homeless;
  for (const Runtime& call : trace.runtime) {
    calls.insert(call.correlation);
    if (call.launch) launches.emplace(call.correlation, &call);
    if (call.name == "cudaGraphLaunch" || call.name == "cuGraphLaunch") ++audit.graph_launches;
    if (call.op < 0) ++audit.api_without_op;
  }
  std::unordered_set<int64_t> seen;
  for (const Kernel& kernel : trace.kernels) {
    ++audit.kernels;
    audit.graph_kernels += kernel.graph_node_id != 0;
    seen.insert(kernel.correlation);
    const auto launch = launches.find(kernel.correlation);
    if (launch != launches.end() && kernel.start_ns != 0 && kernel.start_ns < launch->second->start_ns) early.add(kernel.name);
    if (!calls.contains(kernel.correlation) && kernel.graph_node_id == 0) unlaunched.add(kernel.name);
    if (kernel.graph_node_id != 0 && kernel.op < 0 && kernel.scope < 0) homeless.add(kernel.name);
  }
  for (const auto& [correlation, call] : launches)
    if (!seen.contains(correlation)) lost.add(call->op >= 0 ? call->name + " in " + trace.cpu_ops[call->op].name : call->name);
  audit.launches = static_cast<int64_t>(launches.size());
  audit.launches_without_kernel = lost.count();
  audit.kernels_without_launch = unlaunched.count();
  audit.out_of_order = early.count();
  lost.note(audit.notes, "launches without a kernel record");
  unlaunched.note(audit.notes, "kernels without a launch record");
  early.note(audit.notes, "kernels stamped before their launch");
  homeless.note(audit.notes, "kernels of CUDA graphs that were captured outside of this window, so without operator and scope");
}

void audit_totals(Trace& trace) {
  Audit& audit = trace.audit;
  for (const Overhead& overhead : trace.overheads) audit.overhead_ns[overhead.kind] += overhead.end_ns - overhead.start_ns;
  if (audit.kernels == 0 && audit.launches + audit.graph_launches > 0)
    audit.errors.push_back("no kernel was recorded, but " + std::to_string(audit.launches + audit.graph_launches) +
                           " launches were: the device part of this trace is missing");
  const auto lost = [&](int64_t count, const std::string& what) {
    if (count > 0) audit.errors.push_back(std::to_string(count) + " " + what);
  };
  lost(audit.dropped_records, "records were dropped by CUPTI");
  lost(audit.refused_buffers, "buffers were refused, for the limit of device_buffer_bytes: records are lost. Try: a shorter window");
  lost(audit.truncated_buffers, "buffers could not be read to their end");
  if (audit.outside_window > 0) audit.notes.push_back(std::to_string(audit.outside_window) + " device records outside the window were left out");
  if (audit.cut_by_window > 0) audit.notes.push_back(std::to_string(audit.cut_by_window) + " operators or scopes were open at the window's end");
  constexpr int64_t kClockStep = 1'000'000;
  if (std::abs(audit.clock_shift_ns) > kClockStep)
    audit.notes.push_back("the host's clock was set by " + std::to_string(audit.clock_shift_ns) + " ns during the window");
}

}  // namespace

void audit(Trace& trace) {
  Audit& a = trace.audit;
  a.launches = a.graph_launches = a.kernels = a.graph_kernels = a.api_without_op = 0;
  audit_stamps(trace);
  audit_launches(trace);
  audit_totals(trace);
}

}  // namespace fsdpp::profiler

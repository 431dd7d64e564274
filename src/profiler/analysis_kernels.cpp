#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "fsdpp/profiler/analysis.h"
#include "profiler/analysis_intervals.h"

namespace fsdpp::profiler {
namespace {

struct Summaries {
  std::unordered_map<std::string, size_t> index;
  std::vector<KernelSummary> rows;
  std::vector<int64_t> longest;

  void add(const std::string& name, int64_t duration, int example, bool communication) {
    const auto [it, is_new] = index.emplace(name, rows.size());
    if (is_new) {
      rows.push_back({name, 0, 0, duration, duration, 0, communication, example});
      longest.push_back(duration);
    }
    KernelSummary& row = rows[it->second];
    row.count += 1;
    row.total_ns += duration;
    row.min_ns = std::min(row.min_ns, duration);
    row.max_ns = std::max(row.max_ns, duration);
    if (duration > longest[it->second]) {
      longest[it->second] = duration;
      row.example = example;
    }
  }
  std::vector<KernelSummary> take(int limit) {
    int64_t all = 0;
    for (const KernelSummary& row : rows) all += row.total_ns;
    for (KernelSummary& row : rows)
      row.share = all > 0 ? static_cast<double>(row.total_ns) / static_cast<double>(all) : 0;
    std::stable_sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.total_ns > b.total_ns; });
    if (limit > 0 && std::ssize(rows) > limit) rows.resize(static_cast<size_t>(limit));
    return std::move(rows);
  }
};

void add_operators(const Trace& trace, Window window, Summaries& out) {
  std::vector<int64_t> own(trace.cpu_ops.size());
  for (size_t i = 0; i < own.size(); ++i) {
    const CpuOp& op = trace.cpu_ops[i];
    own[i] += op.end_ns - op.start_ns;
    if (op.parent >= 0) own[static_cast<size_t>(op.parent)] -= op.end_ns - op.start_ns;
  }
  for (size_t i = 0; i < own.size(); ++i) {
    const CpuOp& op = trace.cpu_ops[i];
    if (op.start_ns >= window.start_ns && op.start_ns < window.end_ns && op.category != CpuOp::Category::User) {
      out.add(op.name, own[i], -1, false);
    }
  }
}

}  // namespace

std::vector<KernelSummary> top_kernels(const Trace& trace, int device, Window window, int limit) {
  Summaries summaries;
  if (device == kHostDevice) {
    add_operators(trace, window, summaries);
    return summaries.take(limit);
  }
  std::unordered_set<int> communication;
  for (const Collective& c : trace.collectives) communication.insert(c.kernel);
  for (size_t i = 0; i < trace.kernels.size(); ++i) {
    const Kernel& k = trace.kernels[i];
    if (k.device != device || k.start_ns < window.start_ns || k.start_ns >= window.end_ns || k.start_ns <= 0) continue;
    const bool is_communication = communication.contains(static_cast<int>(i)) || k.name.starts_with("nccl");
    summaries.add(k.name, k.end_ns - k.start_ns, static_cast<int>(i), is_communication);
  }
  return summaries.take(limit);
}

LaunchQueue launch_queue(const Trace& trace, int device, Window window) {
  std::unordered_map<int64_t, int64_t> launched;
  for (const Runtime& r : trace.runtime) {
    if (r.launch) launched.emplace(r.correlation, r.start_ns);
  }
  std::vector<std::pair<int64_t, int>> changes;
  for (const Kernel& k : trace.kernels) {
    const auto it = launched.find(k.correlation);
    if (k.device != device || k.graph_node_id != 0 || k.start_ns <= 0 || it == launched.end()) continue;
    if (it->second < window.start_ns || it->second >= window.end_ns) continue;
    changes.emplace_back(it->second, 1);
    changes.emplace_back(std::max(k.start_ns, it->second), -1);
  }
  std::sort(changes.begin(), changes.end(),
            [](auto& a, auto& b) { return a.first != b.first ? a.first < b.first : a.second > b.second; });
  LaunchQueue out;
  int64_t depth = 0, sum = 0, launches = 0;
  for (const auto& [time, change] : changes) {
    depth += change;
    if (change < 0) continue;
    out.max_depth = std::max(out.max_depth, depth);
    sum += depth;
    ++launches;
  }
  out.mean_depth = launches > 0 ? static_cast<double>(sum) / static_cast<double>(launches) : 0;
  Intervals full;
  for (const Overhead& o : trace.overheads) {
    if (o.kind != "COMMAND_BUFFER_FULL" || o.end_ns <= window.start_ns || o.start_ns >= window.end_ns) continue;
    out.full_count += 1;
    full.push_back({std::max(o.start_ns, window.start_ns), std::min(o.end_ns, window.end_ns)});
  }
  out.full_ns = length(merged(std::move(full)));
  return out;
}

}  // namespace fsdpp::profiler

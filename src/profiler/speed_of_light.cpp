#include "fsdpp/profiler/speed_of_light.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/enforce.h"
#include "profiler/speed_of_light_metrics.h"

namespace fsdpp::profiler {
namespace {

std::optional<double> value_of(const CounterValues& values, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const auto it = values.find(name); it != values.end()) return it->second;
  }
  return std::nullopt;
}

/// A mean weighted by time, absent unless something was added.
struct Mean {
  double sum = 0, weight = 0;
  void add(std::optional<double> value, double w) {
    if (!value) return;
    sum += *value * w;
    weight += w;
  }
  [[nodiscard]] std::optional<double> get() const { return weight > 0 ? std::optional(sum / weight) : std::nullopt; }
};
struct Sum {
  double sum = 0;
  bool any = false;
  void add(std::optional<double> value) {
    any = any || value.has_value();
    sum += value.value_or(0);
  }
  [[nodiscard]] std::optional<double> scaled(double factor) const {
    return any ? std::optional(sum * factor) : std::nullopt;
  }
};

std::optional<double> compute_of(const CounterValues& v) {
  if (const auto sm = value_of(v, {metric::kTriageSm})) return sm;
  const auto tensor = value_of(v, {metric::kTensor});
  const auto issue = value_of(v, {metric::kIssue});
  return std::max(tensor, issue);  // an absent value is the smallest
}

std::optional<double> dram_bytes_of(const CounterValues& v) {
  if (const auto both = value_of(v, {metric::kDramBytes})) return both;
  const auto read = value_of(v, {metric::kDramRead});
  const auto write = value_of(v, {metric::kDramWrite});
  return read || write ? std::optional(read.value_or(0) + write.value_or(0)) : std::nullopt;
}

std::optional<double> flops_of(const CounterValues& v) {
  Sum sum;
  sum.add(value_of(v, {metric::kBf16Ops}));
  sum.add(value_of(v, {"smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"}));
  sum.add(value_of(v, {"smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"}));
  if (const auto fma = value_of(v, {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"})) sum.add(2 * *fma);
  return sum.scaled(1);
}

std::optional<double> l2_of(const CounterValues& v, double time_ns, const Ceilings& ceilings) {
  if (const auto triage = value_of(v, {metric::kTriageL2})) return triage;
  const auto bytes = value_of(v, {metric::kL2Bytes});
  if (!bytes || ceilings.l2_bytes_per_s <= 0 || time_ns <= 0) return std::nullopt;
  return 100 * *bytes / (time_ns * 1e-9) / ceilings.l2_bytes_per_s;
}

}  // namespace

void apply_counters(KernelLight& kernel, std::span<const CounterValues> occurrences, Source source,
                    const Ceilings& ceilings) {
  Mean compute, memory, l2, l1, warps;
  Sum flops, bytes;
  for (const CounterValues& v : occurrences) {
    const double time = value_of(v, {metric::kTime}).value_or(1);
    compute.add(compute_of(v), time);
    memory.add(value_of(v, {metric::kDram, metric::kGpuDram, metric::kTriageDramGh, metric::kTriageDramGb}), time);
    l2.add(l2_of(v, time, ceilings), time);
    l1.add(value_of(v, {metric::kTriageL1}), time);
    warps.add(value_of(v, {metric::kWarps}), time);
    flops.add(flops_of(v));
    bytes.add(dram_bytes_of(v));
  }
  if (!compute.get() && !memory.get()) return;
  const double scale =
      occurrences.empty() ? 0 : static_cast<double>(kernel.count) / static_cast<double>(occurrences.size());
  kernel.source = source;
  kernel.compute_percent = compute.get();
  kernel.memory_percent = memory.get();
  kernel.l2_percent = l2.get();
  kernel.l1_percent = l1.get();
  if (warps.get()) kernel.occupancy_percent = warps.get();
  if (flops.sum > 0) kernel.flops = flops.scaled(scale);  // 0: of a kind that the set does not count
  if (bytes.any) kernel.bytes = bytes.scaled(scale);
}

CountersByKernel join_ranges(std::span<const CounterValues> ranges, std::span<const std::string> kernels) {
  FSDPP_ENFORCE(
      ranges.size() == kernels.size(), UsageError,
      "counters: expected as many ranges as the traced step has kernels, {}, got {}: the steps did not launch the same "
      "sequence. Try: count steps with equal shapes and without evaluation or checkpoints in between.",
      kernels.size(), ranges.size());
  CountersByKernel out;
  for (size_t i = 0; i < ranges.size(); ++i) out[kernels[i]].push_back(ranges[i]);
  return out;
}

CountersByKernel attribute_samples(std::span<const CounterSample> samples, const Trace& trace, int device,
                                   std::vector<std::string>& too_short) {
  struct Weighted {
    CounterValues sums;
    double weight = 0;
    int64_t occurrences = 0, touched = 0;
  };
  std::map<std::string, Weighted> by_name;
  for (const Kernel& k : trace.kernels) {
    if (k.device != device || k.start_ns <= 0) continue;
    Weighted& w = by_name[k.name];
    w.occurrences += 1;
    auto s = std::partition_point(samples.begin(), samples.end(), [&](auto& x) { return x.end_ns <= k.start_ns; });
    for (; s != samples.end() && s->start_ns < k.end_ns; ++s) {
      const auto shared = static_cast<double>(std::min(s->end_ns, k.end_ns) - std::max(s->start_ns, k.start_ns));
      for (const auto& [name, value] : s->values) w.sums[name] += value * shared;
      w.weight += shared;
      w.touched += 1;
    }
  }
  CountersByKernel out;
  for (auto& [name, w] : by_name) {
    if (w.touched < 2 * w.occurrences) {
      too_short.push_back(name);
      continue;
    }
    for (auto& [metric, sum] : w.sums) sum /= w.weight;
    out[name].push_back(std::move(w.sums));
  }
  return out;
}

std::vector<CollectiveWait> collective_waits(std::span<const Trace> ranks) {
  using Call = std::pair<std::string, int64_t>;
  std::map<Call, std::vector<std::pair<int64_t, int>>> calls;  // durations and ranks
  std::map<Call, const Collective*> example;
  for (const Trace& t : ranks) {
    for (const Collective& c : t.collectives) {
      if (c.start_ns <= 0 || c.end_ns < c.start_ns) continue;
      calls[{c.comm, c.sequence}].emplace_back(c.end_ns - c.start_ns, t.rank);
      example.emplace(Call{c.comm, c.sequence}, &c);
    }
  }
  std::map<std::pair<std::string, std::string>, CollectiveWait> rows;
  std::map<std::pair<std::string, std::string>, std::map<int, int64_t>> blame;
  for (const auto& [key, durations] : calls) {
    if (durations.size() < 2) continue;
    const Collective& c = *example[key];
    const auto [fastest, last] = *std::min_element(durations.begin(), durations.end());
    int64_t wait = 0;
    for (const auto& [duration, rank] : durations) wait += duration - fastest;
    CollectiveWait& row = rows[{c.label, c.op}];
    row.label = c.label;
    row.op = c.op;
    row.calls += 1;
    row.wait_ns += wait;
    blame[{c.label, c.op}][last] += wait;
  }
  std::vector<CollectiveWait> out;
  for (auto& [key, row] : rows) {
    const auto& by_rank = blame[key];
    row.straggler =
        std::max_element(by_rank.begin(), by_rank.end(), [](auto& a, auto& b) { return a.second < b.second; })->first;
    out.push_back(row);
  }
  std::stable_sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.wait_ns > b.wait_ns; });
  return out;
}

}  // namespace fsdpp::profiler

#include <algorithm>
#include <unordered_map>

#include "fsdpp/profiler/counters.h"

namespace fsdpp::profiler {
namespace {

Window first_step(const Trace& trace) {
  if (trace.steps.empty()) return {INT64_MIN, INT64_MAX};
  return {trace.steps.front().start_ns, trace.steps.front().end_ns};
}

std::string why_none(const Trace& trace, std::span<const CounterSample> samples, size_t too_short) {
  if (samples.empty()) return "no sample was taken";
  const int64_t off = samples.front().start_ns - trace.start_ns;
  if (samples.back().end_ns <= trace.start_ns || samples.front().start_ns >= trace.end_ns)
    return "the samples are on another clock than the trace: the first of " + std::to_string(samples.size()) + " is " +
           std::to_string(off) + " ns off its start";
  return "all " + std::to_string(too_short) + " kernels are shorter than two samples";
}

}  // namespace

MetricTable::~MetricTable() = default;
RangeCounters::~RangeCounters() = default;
PmSampler::~PmSampler() = default;

std::vector<std::string> launch_order(const Trace& trace, int device) {
  std::unordered_map<int64_t, int64_t> launched;
  for (const Runtime& r : trace.runtime) launched.emplace(r.correlation, r.start_ns);
  const Window step = first_step(trace);
  std::vector<std::pair<std::pair<int64_t, int64_t>, const Kernel*>> order;
  for (const Kernel& k : trace.kernels) {
    const auto it = launched.find(k.correlation);
    const int64_t time = it == launched.end() ? k.start_ns : it->second;
    if (k.device == device && time >= step.start_ns && time < step.end_ns) order.push_back({{time, k.start_ns}, &k});
  }
  std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<std::string> out;
  for (const auto& [time, kernel] : order) out.push_back(kernel->name);
  return out;
}

Counters counters_of_step(const Trace& trace, std::span<const CounterValues> ranges, std::vector<Rung> rungs) {
  return {std::move(rungs), Source::Measured, join_ranges(ranges, launch_order(trace, main_device(trace))), {}};
}

Counters counters_of_samples(const Trace& trace, std::span<const CounterSample> samples, std::vector<Rung> rungs) {
  std::vector<std::string> too_short;
  Counters out{std::move(rungs), Source::Sampled, attribute_samples(samples, trace, main_device(trace), too_short), {}};
  if (out.by_kernel.empty()) {
    std::erase_if(out.rungs, [](const Rung& r) { return r.source == Source::Sampled; });
    out.rungs.push_back({Source::Sampled, false, why_none(trace, samples, too_short.size())});
  } else if (!too_short.empty()) {
    out.notes.push_back(std::to_string(too_short.size()) + " kernels are shorter than two samples");
  }
  return out;
}

}  // namespace fsdpp::profiler

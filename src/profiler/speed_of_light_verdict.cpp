#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "fsdpp/profiler/speed_of_light.h"

namespace fsdpp::profiler {
namespace {

bool is_memory_bound(const KernelLight& k) { return k.compute_percent < 25.0 && k.memory_percent > 75.0; }
bool is_compute_bound(const KernelLight& k) { return k.compute_percent > 75.0 && k.memory_percent < 50.0; }

Bound bound_by_counters(double c, double m, const KernelLight& k) {
  if (m < 50 && (k.l2_percent.value_or(0) > 75 || k.l1_percent.value_or(0) > 75)) return Bound::Cache;
  if (m >= 60 && m > c + 10) return Bound::MemoryLeaning;
  if (c >= 60 && m < 60) return Bound::ComputeLeaning;
  if (c >= 60 || m >= 60) return Bound::Balanced;
  return Bound::Latency;
}

Bound bound_of(const KernelLight& k) {
  const bool counted = k.compute_percent && k.memory_percent;
  if (counted && is_memory_bound(k)) return Bound::Memory;
  if (counted && is_compute_bound(k)) return Bound::Compute;
  if (k.communication) return k.wait_ns.value_or(0) > k.total_ns / 2 ? Bound::Wait : Bound::Communication;
  if (k.idle_before_ns > k.total_ns) return Bound::Launch;
  return counted ? bound_by_counters(*k.compute_percent, *k.memory_percent, k) : Bound::Unknown;
}

std::string latency_fix(const KernelLight& k) {
  std::string why;
  if (k.waves && *k.waves < 1)
    why += fmt::format("the grid fills {:.0f} % of the device: more work per launch; ", 100 * *k.waves);
  if (k.occupancy_percent && *k.occupancy_percent < 50) {
    why += fmt::format("occupancy {:.0f} %{}; ", *k.occupancy_percent,
                       k.occupancy_limit.empty() ? "" : ", limited by " + k.occupancy_limit);
  }
  return "Neither compute nor memory reaches 60 %: " + why +
         "overlap it with other work, fuse small kernels, or replay a CUDA graph.";
}

std::string compute_fix(const KernelLight& k) {
  std::string text = "Use a lower precision (fp32 to bf16, bf16 to fp8) and sizes that are multiples of 64 or 128";
  if (k.waves && *k.waves > 0) {
    const double tail = std::ceil(*k.waves) - *k.waves;
    text += fmt::format("; {:.2f} waves{}", *k.waves,
                        tail > 0.3 ? fmt::format(", the last one is {:.0f} % empty", 100 * tail) : "");
  }
  if (!k.shapes.empty()) text += "; shapes " + k.shapes;
  return text + ".";
}

std::string memory_fix(const KernelLight& k) {
  return fmt::format(
      "Fuse it with its neighbours{}, so that data is read once; quantise what it reads; or raise the batch.",
      k.op.empty() ? "" : " around " + k.op);
}

std::string fix_of(Bound bound, const KernelLight& k) {
  switch (bound) {
    case Bound::Memory:
      return memory_fix(k);
    case Bound::MemoryLeaning:
      return "Leans to memory. " + memory_fix(k);
    case Bound::Cache:
      return "L2 or L1 is the limit, not DRAM: better tiling, keep reused data in shared memory.";
    case Bound::Compute:
      return compute_fix(k);
    case Bound::ComputeLeaning:
      return "Leans to compute. " + compute_fix(k);
    case Bound::Balanced:
      return "Compute and memory are both busy: only less work helps (algorithm, precision).";
    case Bound::Latency:
      return latency_fix(k);
    case Bound::Launch:
      return fmt::format(
          "The device waited {:.3f} ms for its launches and worked {:.3f} ms: replay a CUDA graph, fuse, or launch "
          "fewer operators.",
          k.idle_before_ns * 1e-6, k.total_ns * 1e-6);
    case Bound::Wait:
      return fmt::format("Ranks waited {:.3f} ms for slower ones{}: find out what delays it before this collective.",
                         k.wait_ns.value_or(0) * 1e-6,
                         k.straggler >= 0 ? fmt::format(", mostly for rank {}", k.straggler) : "");
    case Bound::Communication:
      return "Communication: see its exposed time; gather further ahead, or reduce in a smaller dtype.";
    case Bound::Unknown:
      return "No counters, FLOPs or bytes: only its time is known. Record shapes and FLOPs, or allow counters.";
  }
  return {};
}

double recoverable(Bound bound, const KernelLight& k) {
  if (k.communication) return std::min(k.wait_ns.value_or(0), k.total_ns);
  const double busy = std::max(k.compute_percent.value_or(0), k.memory_percent.value_or(0));
  const double in_kernel = bound == Bound::Unknown || busy == 0 ? 0 : k.total_ns * (1 - std::min(busy, 100.0) / 100);
  return in_kernel + k.idle_before_ns;
}

}  // namespace

const char* to_string(Bound bound) noexcept {
  static constexpr const char* kNames[] = {"memory-bound",    "memory-leaning", "cache-bound",   "compute-bound",
                                           "compute-leaning", "balanced",       "latency-bound", "launch-bound",
                                           "wait-bound",      "communication",  "unknown"};
  return kNames[static_cast<int>(bound)];
}

Verdict judge(const KernelLight& kernel) {
  const Bound bound = bound_of(kernel);
  return {bound, fix_of(bound, kernel), recoverable(bound, kernel)};
}

}  // namespace fsdpp::profiler

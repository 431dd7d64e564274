#include <algorithm>
#include <bit>

#include "fsdpp/comm/simulated_world.h"

namespace fsdpp::comm {
namespace {

// ⌈log2 n⌉
int doublings(int n) noexcept { return n <= 1 ? 0 : std::bit_width(static_cast<unsigned>(n - 1)); }

}  // namespace

double FabricRing::bytes_per_s() const noexcept {
  return nodes > 1 ? std::min(within.bytes_per_s, between.bytes_per_s * adapters) : within.bytes_per_s;
}

double FabricRing::ring_latency() const noexcept {
  return (nodes - 1) * between.latency_s + (ranks - nodes) * within.latency_s;
}

double FabricRing::tree_latency() const noexcept {
  return doublings(nodes) * between.latency_s + doublings((ranks + nodes - 1) / nodes) * within.latency_s;
}

double FabricRing::gather(int64_t bytes) const noexcept {
  if (ranks <= 1) return 0;
  const double latency = bytes < tree_below ? tree_latency() : ring_latency();
  return latency + static_cast<double>(bytes) * (ranks - 1) / ranks / bytes_per_s();
}

double FabricRing::all_reduce(int64_t bytes) const noexcept {
  return 2 * std::min(gather(bytes), broadcast(bytes));
}

double FabricRing::broadcast(int64_t bytes) const noexcept {
  return ranks <= 1 ? 0 : tree_latency() + static_cast<double>(bytes) / bytes_per_s();
}

}  // namespace fsdpp::comm

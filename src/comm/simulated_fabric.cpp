#include <bit>

#include "fsdpp/comm/simulated_world.h"

namespace fsdpp::comm {
namespace {

// ⌈log2 n⌉
int doublings(int ranks) noexcept { return ranks <= 1 ? 0 : std::bit_width(static_cast<unsigned>(ranks - 1)); }

}  // namespace

double FabricLink::gather(int64_t bytes, int ranks) const noexcept {
  if (ranks <= 1) return 0;
  const int steps = bytes < tree_below ? doublings(ranks) : ranks - 1;
  return steps * latency_s + static_cast<double>(bytes) * (ranks - 1) / ranks / bytes_per_s;
}

double FabricLink::all_reduce(int64_t bytes, int ranks) const noexcept { return 2 * gather(bytes, ranks); }

double FabricLink::broadcast(int64_t bytes, int ranks) const noexcept {
  return ranks <= 1 ? 0 : doublings(ranks) * latency_s + static_cast<double>(bytes) / bytes_per_s;
}

}  // namespace fsdpp::comm

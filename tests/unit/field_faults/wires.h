#pragma once
/// The same ranks, as threads, over one of two wires.
#include "support/host_world.h"
#include "unit/field_faults/support.h"

namespace fsdpp::test {

enum class Wire { InProcess, Sockets };

/// each_rank() over in-process communicators, or over host communicators on loopback sockets.
inline void each_rank_on(Wire wire, int ranks, const RankBody& body) {
  if (wire == Wire::InProcess) return each_rank(ranks, body);
  const Watchdog watchdog;
  run_host_world(ranks, body);
}

inline std::vector<std::string> verdicts(Wire wire, int ranks, const RankBody& body) {
  return verdicts(ranks, body, [wire](int n, const RankBody& b) { each_rank_on(wire, n, b); });
}

}  // namespace fsdpp::test

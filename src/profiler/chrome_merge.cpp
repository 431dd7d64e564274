#include <algorithm>
#include <map>
#include <utility>

#include "base/enforce.h"
#include "fsdpp/profiler/chrome_trace.h"

namespace fsdpp::profiler {

ClockOffset estimate_clock_offset(std::span<const ClockSample> samples) {
  FSDPP_ENFORCE(!samples.empty(), UsageError, "estimate_clock_offset: expected at least one sample, got none");
  const auto round_trip = [](const ClockSample& s) { return s.answered_ns - s.asked_ns; };
  const auto best = std::min_element(samples.begin(), samples.end(), [&](const auto& a, const auto& b) { return round_trip(a) < round_trip(b); });
  return {best->remote_ns - (best->asked_ns + round_trip(*best) / 2), round_trip(*best) / 2};
}

void align_clocks(std::span<Trace> ranks) {
  if (ranks.empty()) return;
  std::map<std::pair<std::string, int64_t>, int64_t> ends;
  for (const Collective& c : ranks[0].collectives) ends[{c.comm, c.sequence}] = c.end_ns + ranks[0].clock_offset_ns;
  for (Trace& trace : ranks.subspan(1)) {
    if (trace.host == ranks[0].host || trace.clock_offset_ns != 0) continue;
    std::vector<int64_t> differences;
    for (const Collective& c : trace.collectives)
      if (const auto end = ends.find({c.comm, c.sequence}); end != ends.end()) differences.push_back(end->second - c.end_ns);
    if (differences.empty()) continue;
    const auto middle = differences.begin() + static_cast<std::ptrdiff_t>(differences.size() / 2);
    std::nth_element(differences.begin(), middle, differences.end());
    trace.clock_offset_ns = *middle;
  }
}

std::vector<Trace> gather_traces(const Trace& mine, const Gather& gather) {
  const std::vector<std::string> all = gather(to_bytes(mine));
  std::vector<Trace> ranks;
  if (mine.rank != 0) return ranks;
  for (const std::string& bytes : all) ranks.push_back(from_bytes(bytes));
  std::stable_sort(ranks.begin(), ranks.end(), [](const Trace& a, const Trace& b) { return a.rank < b.rank; });
  FSDPP_ENFORCE(static_cast<int>(ranks.size()) == mine.world_size, Error, "gather_traces: expected the records of {} ranks, got {}",
                mine.world_size, ranks.size());
  align_clocks(ranks);
  return ranks;
}

void export_merged_chrome_trace(const std::string& path, const Trace& mine, const Gather& gather) {
  const std::vector<Trace> ranks = gather_traces(mine, gather);
  if (mine.rank == 0) export_chrome_trace(path, ranks);
}

int64_t worst_collective_skew_ns(std::span<const Trace> ranks) {
  struct Ends {
    int64_t first, last;
    int count;
  };
  std::map<std::pair<std::string, int64_t>, Ends> collectives;
  for (const Trace& trace : ranks)
    for (const Collective& c : trace.collectives) {
      const int64_t end = c.end_ns + trace.clock_offset_ns;
      const auto [at, fresh] = collectives.try_emplace({c.comm, c.sequence}, Ends{end, end, 0});
      at->second = {std::min(at->second.first, end), std::max(at->second.last, end), at->second.count + 1};
    }
  int64_t worst = -1;
  for (const auto& [key, ends] : collectives)
    if (ends.count > 1) worst = std::max(worst, ends.last - ends.first);
  return worst;
}

}  // namespace fsdpp::profiler

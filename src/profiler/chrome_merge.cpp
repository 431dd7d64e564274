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

void export_merged_chrome_trace(const std::string& path, const Trace& mine, const Gather& gather) {
  const std::vector<std::string> all = gather(to_bytes(mine));
  if (mine.rank != 0) return;
  std::vector<Trace> ranks;
  for (const std::string& bytes : all) ranks.push_back(from_bytes(bytes));
  std::stable_sort(ranks.begin(), ranks.end(), [](const Trace& a, const Trace& b) { return a.rank < b.rank; });
  FSDPP_ENFORCE(static_cast<int>(ranks.size()) == mine.world_size, Error, "export_merged_chrome_trace: expected the records of {} ranks, got {}",
                mine.world_size, ranks.size());
  export_chrome_trace(path, ranks);
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

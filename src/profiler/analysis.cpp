#include "fsdpp/profiler/analysis.h"

#include <algorithm>
#include <set>

#include "profiler/analysis_intervals.h"

namespace fsdpp::profiler {
namespace {

Intervals of_kind(const std::vector<Work>& activities, Work::Kind kind, Window window) {
  Intervals out;
  for (const Work& a : activities) {
    if (a.kind == kind) out.push_back({std::max(a.start_ns, window.start_ns), std::min(a.end_ns, window.end_ns)});
  }
  return merged(std::move(out));
}

struct Sets {
  Intervals compute, communication, copy;
};
Sets sets_of(const std::vector<Work>& activities, Window window) {
  return {of_kind(activities, Work::Kind::Compute, window), of_kind(activities, Work::Kind::Communication, window),
          of_kind(activities, Work::Kind::Copy, window)};
}

/// Gives every exposed instant to the communication that started first among those that run.
std::vector<int64_t> exposed_by_activity(const std::vector<Work>& activities) {
  const Window all{INT64_MIN, INT64_MAX};
  const Intervals compute = of_kind(activities, Work::Kind::Compute, all);
  std::vector<size_t> order;
  for (size_t i = 0; i < activities.size(); ++i) {
    if (activities[i].kind == Work::Kind::Communication) order.push_back(i);
  }
  std::vector<int64_t> out(activities.size(), 0);
  size_t first = 0;
  for (const Interval& gap : subtract(of_kind(activities, Work::Kind::Communication, all), compute)) {
    for (int64_t at = gap.start; at < gap.end;) {
      while (activities[order[first]].end_ns <= at) ++first;
      size_t owner = first;
      while (activities[order[owner]].end_ns <= at) ++owner;
      const int64_t until = std::min(gap.end, activities[order[owner]].end_ns);
      out[order[owner]] += until - at;
      at = until;
    }
  }
  return out;
}

std::string op_name(const Trace& trace, int op) {
  return op >= 0 ? trace.cpu_ops[static_cast<size_t>(op)].name : std::string();
}

}  // namespace

std::optional<double> TimeSplit::overlap() const {
  if (communication_ns <= 0) return std::nullopt;
  return 1.0 - static_cast<double>(exposed_ns) / static_cast<double>(communication_ns);
}

TimeSplit split_time(const std::vector<Work>& activities, Window window) {
  const Sets sets = sets_of(activities, window);
  TimeSplit out;
  out.window_ns = window.length();
  out.compute_ns = length(sets.compute);
  out.communication_ns = length(sets.communication);
  const Intervals exposed = subtract(sets.communication, sets.compute);
  out.exposed_ns = length(exposed);
  out.copy_ns = length(subtract(subtract(sets.copy, sets.compute), sets.communication));
  out.idle_ns = out.window_ns - out.compute_ns - out.exposed_ns - out.copy_ns;
  return out;
}

std::vector<UnitCommunication> exposed_communication(const Trace& trace, const std::vector<Work>& activities) {
  const std::vector<int64_t> exposed = exposed_by_activity(activities);
  std::map<std::string, UnitCommunication> units;
  for (size_t i = 0; i < activities.size(); ++i) {
    const Work& a = activities[i];
    if (a.kind != Work::Kind::Communication) continue;
    UnitCommunication& unit = units[a.unit];
    unit.unit = a.unit;
    unit.calls += 1;
    unit.bytes += a.collective >= 0 ? trace.collectives[static_cast<size_t>(a.collective)].bytes : 0;
    unit.total_ns += a.end_ns - a.start_ns;
    unit.exposed_ns += exposed[i];
    unit.exposed_by_op[a.what] += exposed[i];
  }
  std::vector<UnitCommunication> out;
  for (auto& [name, unit] : units) out.push_back(std::move(unit));
  std::stable_sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.exposed_ns > b.exposed_ns; });
  return out;
}

LaunchGaps launch_gaps(const Trace& trace, const std::vector<Work>& activities, const std::vector<IdlePiece>& idle,
                       int limit) {
  LaunchGaps out;
  for (const IdlePiece& piece : idle) {
    if (piece.cause != IdleCause::LaunchBound) continue;
    LaunchGap gap{piece.start_ns, piece.end_ns - piece.start_ns, "", ""};
    if (piece.next >= 0) {
      const Work& next = activities[static_cast<size_t>(piece.next)];
      gap.kernel = next.what;
      gap.op = op_name(trace, next.op);
    }
    out.count += 1;
    out.total_ns += gap.length_ns;
    out.by_op[gap.op] += gap.length_ns;
    out.longest.push_back(std::move(gap));
  }
  std::stable_sort(out.longest.begin(), out.longest.end(), [](auto& a, auto& b) { return a.length_ns > b.length_ns; });
  if (std::ssize(out.longest) > limit) out.longest.resize(static_cast<size_t>(limit));
  return out;
}

LoaderWait loader_wait(const Trace& trace, Window window) {
  std::set<int64_t> threads;
  for (const StepMark& s : trace.steps) threads.insert(s.thread);
  std::map<int64_t, Intervals> waits;
  Intervals preparing;
  LoaderWait out;
  for (const Scope& s : trace.scopes) {
    const Interval i{std::max(s.start_ns, window.start_ns), std::min(s.end_ns, window.end_ns)};
    if (s.kind != trace::Kind::Loader || i.end <= i.start) continue;
    if (!threads.empty() && !threads.contains(s.thread)) {
      out.prepare_count += 1;
      out.prepare_ns += i.end - i.start;
      preparing.push_back(i);
      continue;
    }
    out.count += 1;
    out.longest_ns = std::max(out.longest_ns, i.end - i.start);
    waits[s.thread].push_back(i);
  }
  preparing = merged(std::move(preparing));
  for (auto& [thread, intervals] : waits) {
    const Intervals mine = merged(std::move(intervals));
    out.total_ns += length(mine);
    out.starved_ns += length(intersect(mine, preparing));
  }
  return out;
}

Analysis analyse(const Trace& trace) {
  Analysis out;
  out.rank = trace.rank;
  out.device = main_device(trace);
  out.window = analysis_window(trace);
  out.activities = device_activities(trace, out.device, out.window);
  out.split = split_time(out.activities, out.window);
  out.units = exposed_communication(trace, out.activities);
  out.idle = idle_pieces(trace, out.activities, out.window);
  for (const IdlePiece& p : out.idle) out.idle_ns[static_cast<size_t>(p.cause)] += p.end_ns - p.start_ns;
  out.gaps = launch_gaps(trace, out.activities, out.idle);
  const Window on_host = host_window(trace, out.window);
  out.queue = launch_queue(trace, out.device, on_host);
  out.loader = loader_wait(trace, on_host);
  out.steps = step_times(trace, out.activities, out.window);
  out.kernels = top_kernels(trace, out.device, out.window, 0);
  out.memory = memory_timeline(trace, out.device);
  return out;
}

}  // namespace fsdpp::profiler

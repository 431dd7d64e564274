#include <algorithm>
#include <unordered_map>

#include "fsdpp/profiler/analysis.h"

namespace fsdpp::profiler {
namespace {

/// What devices did, by when the host launched it: at its start at the latest, where the launch has no record.
class LaunchedWork {
 public:
  explicit LaunchedWork(const Trace& trace) {
    std::unordered_map<int64_t, int64_t> launches;
    for (const Runtime& r : trace.runtime) launches.emplace(r.correlation, r.start_ns);
    const auto add = [&](const auto& records) {
      for (const auto& r : records) {
        if (r.start_ns <= 0 || r.end_ns < r.start_ns) continue;
        const auto launch = launches.find(r.correlation);
        const bool known = launch != launches.end();
        work_.push_back({known ? launch->second : r.start_ns, r.start_ns, r.end_ns, known});
        if (!known) unknown_end_ = std::max(unknown_end_, r.end_ns);
      }
    };
    add(trace.kernels);
    add(trace.copies);
    std::sort(work_.begin(), work_.end(), [](const Item& a, const Item& b) { return a.launch < b.launch; });
    for (int64_t end = 0; Item & w : work_) w.end_so_far = end = std::max(end, w.end_so_far);
  }
  /// When the host is at `time` and the device done with all that was launched before, whichever is later.
  [[nodiscard]] int64_t done(int64_t time) const {
    const auto next = after(time);
    return next == work_.begin() ? time : std::max(time, std::prev(next)->end_so_far);
  }
  /// Whether the host launched more after `time` while the device was still busy with what came before.
  [[nodiscard]] bool continues(int64_t time) const {
    const auto next = std::find_if(after(time), work_.end(), [](const Item& w) { return w.known; });
    return next != work_.end() && next->launch < done(time);
  }
  /// The first start of what was launched within the step; its start if nothing was.
  [[nodiscard]] int64_t first_start(const StepMark& step) const {
    int64_t first = INT64_MAX;
    for (auto w = after(step.start_ns), end = after(step.end_ns); w != end; ++w) first = std::min(first, w->start);
    return first == INT64_MAX ? step.start_ns : first;
  }
  /// The last end of work without a record of its launch.
  [[nodiscard]] int64_t unknown_end() const noexcept { return unknown_end_; }

 private:
  struct Item {
    int64_t launch, start, end_so_far;
    bool known;
  };
  [[nodiscard]] std::vector<Item>::const_iterator after(int64_t time) const {
    return std::lower_bound(work_.begin(), work_.end(), time, [](const Item& w, int64_t t) { return w.launch < t; });
  }
  std::vector<Item> work_;
  int64_t unknown_end_ = 0;
};

struct Envelope {
  int64_t start = 0;
  int64_t end = 0;
  template <class Records>
  void add(const Records& records) {
    for (const auto& r : records) {
      if (r.start_ns <= 0 || r.end_ns < r.start_ns) continue;
      start = start == 0 ? r.start_ns : std::min(start, r.start_ns);
      end = std::max(end, r.end_ns);
    }
  }
};

const StepMark& first_of(const std::vector<StepMark>& steps) {
  return *std::ranges::min_element(steps, {}, &StepMark::start_ns);
}
const StepMark& last_of(const std::vector<StepMark>& steps) {
  return *std::ranges::max_element(steps, {}, &StepMark::end_ns);
}

/// Where the device goes on to the second step without a pause, its wait for the first is no part of a step.
int64_t start_of(const StepMark& first, const LaunchedWork& work) {
  const int64_t ready = work.done(first.start_ns);
  return work.continues(first.end_ns) ? std::max(ready, work.first_start(first)) : ready;
}

Window window_of_steps(const Trace& trace) {
  const LaunchedWork work(trace);
  const int64_t last = last_of(trace.steps).end_ns;
  int64_t end = std::max(work.done(last), work.unknown_end());
  if (trace.end_ns > 0) end = std::max(last, std::min(end, trace.end_ns));
  return {std::min(start_of(first_of(trace.steps), work), end), end};
}

}  // namespace

Window analysis_window(const Trace& trace) {
  if (!trace.steps.empty()) return window_of_steps(trace);
  if (trace.end_ns > trace.start_ns) return {trace.start_ns, trace.end_ns};
  Envelope all;
  all.add(trace.kernels);
  all.add(trace.copies);
  all.add(trace.cpu_ops);
  all.add(trace.scopes);
  all.add(trace.collectives);
  return {all.start, all.end};
}

Window host_window(const Trace& trace, Window window) {
  if (!trace.steps.empty()) window.start_ns = std::min(window.start_ns, first_of(trace.steps).start_ns);
  return window;
}

std::vector<StepTime> step_times(const Trace& trace, const std::vector<Work>& activities, Window window) {
  const LaunchedWork work(trace);
  std::vector<StepTime> out;
  for (const StepMark& s : trace.steps) {
    const int64_t start = &s == &first_of(trace.steps) ? window.start_ns : work.done(s.start_ns);
    const int64_t end = &s == &last_of(trace.steps) ? window.end_ns : work.done(s.end_ns);
    const int64_t loader_ns = loader_wait(trace, {s.start_ns, s.end_ns}).total_ns;
    out.push_back({s.step, start, split_time(activities, {start, end}), loader_ns});
  }
  return out;
}

}  // namespace fsdpp::profiler

#include <algorithm>
#include <unordered_map>

#include "fsdpp/profiler/analysis.h"
#include "profiler/analysis_intervals.h"

namespace fsdpp::profiler {
namespace {

constexpr int64_t kAnyThread = INT64_MIN;

/// Stretches of host time that explain why nothing was launched; those of one thread, or of all for kAnyThread.
struct Claim {
  IdleCause cause;
  std::unordered_map<int64_t, Intervals> by_thread;
  void add(int64_t thread, int64_t start, int64_t end) {
    by_thread[thread].push_back({start, end});
    if (thread != kAnyThread) by_thread[kAnyThread].push_back({start, end});
  }
  const Intervals& of(int64_t thread) const {
    static const Intervals none;
    const auto it = by_thread.find(thread);
    return it == by_thread.end() ? none : it->second;
  }
};

bool starts_with_any(const std::string& text, std::initializer_list<const char*> heads) {
  return std::any_of(heads.begin(), heads.end(), [&](const char* head) { return text.starts_with(head); });
}
bool allocates(const std::string& name) {
  return starts_with_any(name, {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap", "cuMemUnmap",
                                "cuMemRelease", "cuMemAlloc", "cuMemFree"});
}
bool waits(const std::string& name) { return name.find("Synchronize") != std::string::npos; }

void claim_overheads(const Trace& trace, Claim& full, Claim& loading, Claim& profiler) {
  for (const Overhead& o : trace.overheads) {
    Claim* claim = &profiler;
    if (o.kind == "COMMAND_BUFFER_FULL") claim = &full;
    if (o.kind.find("LOADING") != std::string::npos) claim = &loading;
    claim->add(o.thread, o.start_ns, o.end_ns);
  }
}

void claim_calls(const Trace& trace, Claim& allocation, Claim& sync) {
  for (const Runtime& r : trace.runtime) {
    if (allocates(r.name)) allocation.add(r.thread, r.start_ns, r.end_ns);
    if (waits(r.name)) sync.add(r.thread, r.start_ns, r.end_ns);
  }
  for (const Sync& s : trace.syncs) {
    if (s.kind != Sync::Kind::StreamWaitEvent) sync.add(s.thread, s.start_ns, s.end_ns);
  }
}

/// In the order in which they may claim.
std::vector<Claim> claims_of(const Trace& trace) {
  std::vector<Claim> c;
  for (const IdleCause cause :
       {IdleCause::QueueFull, IdleCause::ModuleLoading, IdleCause::Profiler, IdleCause::DataLoader,
        IdleCause::Allocation, IdleCause::Communication, IdleCause::Synchronisation}) {
    c.push_back({cause, {}});
  }
  claim_overheads(trace, c[0], c[1], c[2]);
  for (const Scope& s : trace.scopes) {
    if (s.kind == trace::Kind::Loader) c[3].add(s.thread, s.start_ns, s.end_ns);
  }
  for (const Collective& k : trace.collectives) {
    if (!k.on_device) c[5].add(k.thread, k.start_ns, k.end_ns);
  }
  claim_calls(trace, c[4], c[6]);
  for (Claim& claim : c) {
    for (auto& [thread, intervals] : claim.by_thread) intervals = merged(std::move(intervals));
  }
  return c;
}

/// Splits gaps of the device into pieces.
class Splitter {
 public:
  explicit Splitter(const Trace& trace) : claims_(claims_of(trace)), trace_(trace) {
    for (size_t i = 0; i < trace.runtime.size(); ++i) launches_.emplace(trace.runtime[i].correlation, i);
  }

  void split(Interval gap, int next, int64_t correlation) {
    const auto it = correlation != 0 ? launches_.find(correlation) : launches_.end();
    if (it == launches_.end()) {
      claim(gap, next, kAnyThread, IdleCause::Other, false);
      return;
    }
    const Runtime& launch = trace_.runtime[it->second];
    const int64_t launched = std::clamp(launch.end_ns, gap.start, gap.end);
    claim({gap.start, launched}, next, launch.thread, IdleCause::LaunchBound, true);
    wait_for_host_collectives({launched, gap.end}, next);
  }
  void add(IdleCause cause, const Intervals& set, int next) {
    for (const Interval& i : set) pieces_.push_back({cause, i.start, i.end, next});
  }
  std::vector<IdlePiece> take() {
    std::sort(pieces_.begin(), pieces_.end(), [](auto& a, auto& b) { return a.start_ns < b.start_ns; });
    return std::move(pieces_);
  }

 private:
  /// `sync_explains_rest`: a thread that waited for the device had an empty queue when it came back.
  void claim(Interval part, int next, int64_t thread, IdleCause rest, bool sync_explains_rest) {
    Intervals left = merged({part});
    for (const Claim& c : claims_) {
      if (left.empty()) return;
      const Intervals taken = near(c.of(thread), part);
      const Intervals mine = intersect(left, taken);
      if (c.cause == IdleCause::Synchronisation && sync_explains_rest && !taken.empty())
        rest = IdleCause::Synchronisation;
      add(c.cause, mine, next);
      left = subtract(left, mine);
    }
    add(rest, left, next);
  }
  void wait_for_host_collectives(Interval part, int next) {
    const Intervals whole = merged({part});
    const Intervals mine = intersect(whole, near(claims_[5].of(kAnyThread), part));
    add(IdleCause::Communication, mine, next);
    add(IdleCause::Dispatch, subtract(whole, mine), next);
  }
  /// The intervals of a sorted set that meet `part`.
  static Intervals near(const Intervals& set, Interval part) {
    auto it = std::partition_point(set.begin(), set.end(), [&](const Interval& i) { return i.end <= part.start; });
    Intervals out;
    for (; it != set.end() && it->start < part.end; ++it) out.push_back(*it);
    return out;
  }

  std::vector<Claim> claims_;
  const Trace& trace_;
  std::unordered_map<int64_t, size_t> launches_;
  std::vector<IdlePiece> pieces_;
};

Intervals busy(const std::vector<Work>& activities, Work::Kind kind) {
  Intervals out;
  for (const Work& a : activities) {
    if (a.kind == kind) out.push_back({a.start_ns, a.end_ns});
  }
  return merged(std::move(out));
}

}  // namespace

const char* to_string(IdleCause cause) noexcept {
  static constexpr const char* kNames[kIdleCauses] = {
      "communication",  "data loader", "launch-bound", "synchronisation", "queue full", "allocation",
      "module loading", "profiler",    "copy",         "dispatch",        "other"};
  return kNames[static_cast<int>(cause)];
}

std::vector<IdlePiece> idle_pieces(const Trace& trace, const std::vector<Work>& activities, Window window) {
  Splitter splitter(trace);
  const Intervals all = merged({{window.start_ns, window.end_ns}});
  Intervals idle = subtract(all, busy(activities, Work::Kind::Compute));
  const Intervals exposed = intersect(idle, busy(activities, Work::Kind::Communication));
  splitter.add(IdleCause::Communication, exposed, -1);
  idle = subtract(idle, exposed);
  const Intervals copies = intersect(idle, busy(activities, Work::Kind::Copy));
  splitter.add(IdleCause::Copy, copies, -1);
  size_t next = 0;
  for (const Interval& gap : subtract(idle, copies)) {
    while (next < activities.size() && activities[next].start_ns < gap.end) ++next;
    const bool known = next < activities.size();
    splitter.split(gap, known ? static_cast<int>(next) : -1, known ? activities[next].correlation : 0);
  }
  return splitter.take();
}

}  // namespace fsdpp::profiler

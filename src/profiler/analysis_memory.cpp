#include <algorithm>
#include <map>
#include <unordered_map>

#include "fsdpp/profiler/analysis.h"

namespace fsdpp::profiler {
namespace {

size_t slot(MemoryEvent::Category category) { return static_cast<size_t>(category); }

std::string owner_of(const Trace& trace, const MemoryEvent& e) {
  if (e.before) return "(before the window)";
  for (int s = e.scope; s >= 0; s = trace.scopes[static_cast<size_t>(s)].parent) {
    if (!trace.scopes[static_cast<size_t>(s)].name.empty()) return trace.scopes[static_cast<size_t>(s)].name;
  }
  return e.op >= 0 ? trace.cpu_ops[static_cast<size_t>(e.op)].name : std::string();
}

/// Follows the blocks that live on one device.
class Follower {
 public:
  void apply(const MemoryEvent& e, size_t index) {
    if (e.bytes >= 0) {
      live_[e.address] = index;
      now_.bytes[slot(e.category)] += e.bytes;
      return;
    }
    const auto it = live_.find(e.address);
    if (it == live_.end()) {  // taken before the trace began
      now_.bytes[slot(MemoryEvent::Category::Other)] += e.bytes;
      return;
    }
    now_.bytes[slot(events_[it->second]->category)] += e.bytes;
    live_.erase(it);
  }
  Follower(const std::vector<const MemoryEvent*>& events, int64_t before) : events_(events) {
    now_.bytes[slot(MemoryEvent::Category::Other)] = before;
  }
  MemoryPoint now_;
  std::unordered_map<uint64_t, size_t> live_;

 private:
  const std::vector<const MemoryEvent*>& events_;
};

std::vector<MemoryPoint> thinned(const std::vector<MemoryPoint>& points, int limit) {
  if (limit <= 0 || std::ssize(points) <= limit) return points;
  std::vector<MemoryPoint> out;
  const auto n = points.size();
  for (size_t k = 0; k < static_cast<size_t>(limit); ++k) {
    const auto first = points.begin() + static_cast<std::ptrdiff_t>(k * n / static_cast<size_t>(limit));
    const auto last = points.begin() + static_cast<std::ptrdiff_t>((k + 1) * n / static_cast<size_t>(limit));
    out.push_back(*std::max_element(first, last, [](auto& a, auto& b) { return a.total() < b.total(); }));
  }
  return out;
}

std::vector<MemoryOwner> owners_at(const Trace& trace, const std::vector<const MemoryEvent*>& events, size_t last,
                                   int64_t before) {
  Follower follower(events, before);
  for (size_t i = 0; i <= last; ++i) follower.apply(*events[i], i);
  std::map<std::pair<MemoryEvent::Category, std::string>, MemoryOwner> owners;
  for (const auto& [address, index] : follower.live_) {
    const MemoryEvent& e = *events[index];
    MemoryOwner& owner = owners[{e.category, owner_of(trace, e)}];
    owner.bytes += e.bytes;
    owner.blocks += 1;
  }
  std::vector<MemoryOwner> out;
  for (auto& [key, owner] : owners) out.push_back({key.first, key.second, owner.bytes, owner.blocks});
  std::stable_sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
  return out;
}

/// What was allocated before the first event, without what the program accounted for.
int64_t unknown_before(const std::vector<const MemoryEvent*>& events) {
  int64_t known = 0;
  for (const MemoryEvent* e : events) {
    if (!e->before) return std::max<int64_t>(e->total_bytes - e->bytes - known, 0);
    known += e->bytes;
  }
  return 0;
}

}  // namespace

const char* to_string(MemoryEvent::Category category) noexcept {
  static constexpr const char* kNames[kMemoryCategories] = {"parameters",  "gradients", "gathered",
                                                            "activations", "optimizer", "other"};
  return kNames[static_cast<int>(category)];
}

int64_t MemoryPoint::total() const noexcept {
  int64_t sum = 0;
  for (const int64_t b : bytes) sum += b;
  return sum;
}

MemoryTimeline memory_timeline(const Trace& trace, int device, int limit) {
  std::vector<const MemoryEvent*> events;
  for (const MemoryEvent& e : trace.memory) {
    if (e.device == device) events.push_back(&e);
  }
  std::stable_sort(events.begin(), events.end(), [](auto* a, auto* b) { return a->time_ns < b->time_ns; });
  MemoryTimeline out;
  out.device = device;
  if (events.empty()) return out;
  out.bytes_before = unknown_before(events);
  Follower follower(events, out.bytes_before);
  std::vector<MemoryPoint> points;
  size_t peak = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    follower.apply(*events[i], i);
    follower.now_.time_ns = events[i]->time_ns;
    points.push_back(follower.now_);
    if (points[i].total() > points[peak].total()) peak = i;
  }
  out.peak = points[peak];
  out.owners = owners_at(trace, events, peak, out.bytes_before);
  out.points = thinned(points, limit);
  return out;
}

}  // namespace fsdpp::profiler

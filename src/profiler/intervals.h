#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

/// Intervals of host threads: who encloses whom, and which is the innermost at a moment.
namespace fsdpp::profiler {

class IntervalIndex {
 public:
  /// `items[i]` has start_ns, end_ns and thread; the intervals of a thread nest. Of two equal ones the first encloses.
  template <class Item>
  explicit IntervalIndex(const std::vector<Item>& items) : parents_(items.size(), -1) {
    std::vector<int> order(items.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      const Item &x = items[a], &y = items[b];
      return x.start_ns != y.start_ns ? x.start_ns < y.start_ns : x.end_ns > y.end_ns;
    });
    for (const int i : order) add(i, items[i].start_ns, items[i].end_ns, items[i].thread);
  }

  [[nodiscard]] const std::vector<int>& parents() const noexcept { return parents_; }

  /// The innermost interval of `thread` that contains `time`, or -1.
  [[nodiscard]] int innermost(int64_t thread, int64_t time) const {
    const auto found = threads_.find(thread);
    if (found == threads_.end()) return -1;
    const auto& entries = found->second;
    auto after = std::upper_bound(entries.begin(), entries.end(), time, [](int64_t t, const Entry& e) { return t < e.start; });
    if (after == entries.begin()) return -1;
    for (auto at = static_cast<int>(after - entries.begin()) - 1; at >= 0; at = entries[at].up)
      if (time < entries[at].end) return entries[at].item;
    return -1;
  }

 private:
  struct Entry {
    int64_t start, end;
    int item;
    int up;  // index of the enclosing entry
  };

  void add(int item, int64_t start, int64_t end, int64_t thread) {
    auto& entries = threads_[thread];
    int up = static_cast<int>(entries.size()) - 1;
    while (up >= 0 && entries[up].end < end) up = entries[up].up;
    while (up >= 0 && entries[up].end <= start) up = entries[up].up;
    if (up >= 0) parents_[item] = entries[up].item;
    entries.push_back({start, end, item, up});
  }

  std::vector<int> parents_;
  std::map<int64_t, std::vector<Entry>> threads_;
};

}  // namespace fsdpp::profiler

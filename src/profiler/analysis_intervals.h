#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

/// Sets of instants as sorted, disjoint, non-empty half-open intervals.
namespace fsdpp::profiler {

struct Interval {
  int64_t start = 0;
  int64_t end = 0;
  bool operator==(const Interval&) const = default;
};
using Intervals = std::vector<Interval>;

/// The union of any intervals; empty and reversed ones vanish, touching ones join.
inline Intervals merged(Intervals any) {
  std::erase_if(any, [](const Interval& i) { return i.end <= i.start; });
  std::sort(any.begin(), any.end(), [](const Interval& a, const Interval& b) { return a.start < b.start; });
  Intervals out;
  for (const Interval& i : any) {
    if (!out.empty() && i.start <= out.back().end) {
      out.back().end = std::max(out.back().end, i.end);
    } else {
      out.push_back(i);
    }
  }
  return out;
}

inline int64_t length(const Intervals& set) {
  int64_t sum = 0;
  for (const Interval& i : set) sum += i.end - i.start;
  return sum;
}

/// a without b.
inline Intervals subtract(const Intervals& a, const Intervals& b) {
  Intervals out;
  size_t first = 0;
  for (const Interval& i : a) {
    while (first < b.size() && b[first].end <= i.start) ++first;
    int64_t at = i.start;
    for (size_t k = first; k < b.size() && b[k].start < i.end; ++k) {
      if (b[k].start > at) out.push_back({at, b[k].start});
      at = std::max(at, b[k].end);
    }
    if (at < i.end) out.push_back({at, i.end});
  }
  return out;
}

inline Intervals intersect(const Intervals& a, const Intervals& b) {
  Intervals out;
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    const int64_t start = std::max(a[i].start, b[k].start);
    const int64_t end = std::min(a[i].end, b[k].end);
    if (start < end) out.push_back({start, end});
    (a[i].end < b[k].end) ? ++i : ++k;
  }
  return out;
}

}  // namespace fsdpp::profiler

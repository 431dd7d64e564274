#include <map>
#include <numeric>

#include "shard/plan_pack.h"

namespace fsdpp::shard::detail {

int64_t bounded_lcm(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a / std::gcd(a, b), b, &result) || result > kMaxElements) return kMaxElements;
  return result;
}

std::optional<int64_t> first_offset(int64_t from, const Item& item, const Grid& grid) {
  const int64_t start = round_up(from, grid.align);
  if (item.step == grid.align) return start;  // borders are aligned, so all of them are row borders
  const int64_t border = (start / grid.slice + 1) * grid.slice;
  if (start + item.numel <= border) return start;
  const int64_t aligned = border - round_down(border - start, item.step);
  if (item.numel <= grid.slice || grid.slice % item.row == 0) return aligned;
  // Longer than a slice, and rows that do not divide the slice: at most one border inside.
  if (aligned < border && aligned + item.numel <= border + grid.slice) return aligned;
  const int64_t next = border + grid.slice % item.step;
  if (next + item.numel <= border + 2 * grid.slice) return next;
  return std::nullopt;
}

namespace {

/// Free ranges between placed items, by length.
class Gaps {
 public:
  explicit Gaps(const Grid& grid) : grid_(grid) {}

  [[nodiscard]] int64_t total() const { return total_; }

  void add(int64_t begin, int64_t end) {
    begin = round_up(begin, grid_.align);
    if (begin >= end) return;
    by_size_.emplace(end - begin, begin);
    total_ += end - begin;
  }

  /// Takes room for `item` out of one of the smallest gaps that hold it.
  std::optional<int64_t> take(const Item& item) {
    constexpr int kTries = 8;
    int tries = 0;
    for (auto it = by_size_.lower_bound(item.numel); it != by_size_.end() && tries < kTries; ++it, ++tries) {
      const auto [size, begin] = *it;
      const auto offset = first_offset(begin, item, grid_);
      if (!offset || *offset + item.numel > begin + size) continue;
      by_size_.erase(it);
      total_ -= size;
      add(begin, *offset);
      add(*offset + item.numel, begin + size);
      return offset;
    }
    return std::nullopt;
  }

 private:
  const Grid& grid_;
  std::multimap<int64_t, int64_t> by_size_;
  int64_t total_ = 0;
};

}  // namespace

std::optional<std::vector<int64_t>> pack(std::span<const Item> items, const Grid& grid) {
  std::vector<int64_t> offsets;
  offsets.reserve(items.size());
  Gaps gaps(grid);
  int64_t end = 0;
  int64_t remaining = 0;
  for (const Item& item : items) remaining += round_up(item.numel, grid.align);
  for (const Item& item : items) {
    auto offset = gaps.take(item);
    if (!offset) {
      offset = first_offset(end, item, grid);
      if (!offset || *offset + item.numel > grid.total()) return std::nullopt;
      gaps.add(end, *offset);
      end = round_up(*offset + item.numel, grid.align);
    }
    offsets.push_back(*offset);
    remaining -= round_up(item.numel, grid.align);
    if (end + remaining - gaps.total() > grid.total()) return std::nullopt;
  }
  return offsets;
}

}  // namespace fsdpp::shard::detail

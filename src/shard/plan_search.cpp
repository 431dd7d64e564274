#include <algorithm>
#include <set>

#include "shard/plan_pack.h"

namespace fsdpp::shard::detail {
namespace {

constexpr size_t kLinearLevels = 64;      // up to this many parameters with rows, every level is tried
constexpr size_t kManyItems = 1000;       // beyond, fewer candidate slices are tried …
constexpr size_t kCandidatesOfMany = 16;  // … namely this many
constexpr size_t kDistinctRows = 8;

struct Result {
  Grid grid;
  std::vector<Item> items;
  std::vector<int64_t> offsets;
};

/// Searches the smallest slice that works. Level k lets the k parameters with the longest rows be cut anywhere.
class Search {
 public:
  explicit Search(const Plan& plan)
      : world_(plan.options.world_size), align_(plan.options.param_align), unit_(plan.options.slice_align) {
    int64_t aligned = 0;
    for (size_t i = 0; i < plan.params.size(); ++i) {
      const ParamPlacement& p = plan.params[i];
      if (p.numel == 0) continue;
      items_.push_back({i, p.numel, p.row_numel, bounded_lcm(p.row_numel, align_)});
      aligned += round_up(p.numel, align_);
    }
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) {
      return is_rigid(a) != is_rigid(b) ? is_rigid(a) : a.row > b.row;
    });
    lowest_ = round_up((aligned + world_ - 1) / world_, unit_);
    highest_ = std::max(lowest_, round_down((plan.used_numel + plan.padding_bound) / world_, unit_));
  }

  [[nodiscard]] Result run() const {
    const auto levels =
        static_cast<size_t>(std::count_if(items_.begin(), items_.end(), [&](const Item& i) { return is_rigid(i); }));
    return levels <= kLinearLevels ? linear(levels) : bisect(levels);
  }

 private:
  /// Whether some borders are not between rows of this parameter, wherever it starts.
  [[nodiscard]] bool is_rigid(const Item& item) const { return item.step != align_; }

  [[nodiscard]] Result linear(size_t levels) const {
    for (size_t level = 0; level < levels; ++level) {
      if (auto result = at_level(level)) return *std::move(result);
    }
    return last(levels);
  }

  [[nodiscard]] Result bisect(size_t levels) const {
    if (auto result = at_level(0)) return *std::move(result);
    size_t bad = 0;
    size_t good = levels;
    Result best = last(levels);
    while (good - bad > 1) {
      const size_t level = bad + (good - bad) / 2;
      if (auto result = at_level(level)) {
        best = *std::move(result);
        good = level;
      } else {
        bad = level;
      }
    }
    return best;
  }

  /// Everything may be cut anywhere: a plain sequence, which always fits the lowest slice.
  [[nodiscard]] Result last(size_t levels) const {
    Result result{{lowest_, world_, align_}, loosened(levels), {}};
    result.offsets = pack(result.items, result.grid).value();
    return result;
  }

  [[nodiscard]] std::optional<Result> at_level(size_t level) const {
    std::vector<Item> by_step = loosened(level);
    std::vector<Item> by_size = by_step;
    std::stable_sort(by_step.begin(), by_step.end(), [&](const Item& a, const Item& b) {
      return a.step != b.step ? a.step > b.step : a.numel > b.numel;
    });
    std::stable_sort(by_size.begin(), by_size.end(), [&](const Item& a, const Item& b) {
      return is_rigid(a) != is_rigid(b) ? is_rigid(a) : a.numel > b.numel;
    });
    for (const int64_t slice : candidates(by_step)) {
      const Grid grid{slice, world_, align_};
      for (const auto* order : {&by_step, &by_size}) {
        if (auto offsets = pack(*order, grid)) return Result{grid, *order, *std::move(offsets)};
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] std::vector<Item> loosened(size_t level) const {
    std::vector<Item> items = items_;
    for (size_t i = 0; i < level; ++i) {
      items[i].row = 1;
      items[i].step = align_;
    }
    return items;
  }

  /// Slices worth a try, smallest first: multiples of what the rows of long parameters ask for.
  [[nodiscard]] std::vector<int64_t> candidates(std::span<const Item> items) const {
    std::set<int64_t> slices;
    const std::set<int64_t> starts = start_points(items);
    for (const int64_t unit : slice_units(items)) {
      for (const int64_t start : starts) {
        const int64_t slice = round_up(start, unit);
        if (slice <= highest_) slices.insert(slice);
      }
      const int64_t largest = round_down(highest_, unit);
      if (largest >= lowest_) slices.insert(largest);
    }
    std::vector<int64_t> good;
    std::copy_if(slices.begin(), slices.end(), std::back_inserter(good),
                 [&](int64_t slice) { return possible(items, slice); });
    return items.size() > kManyItems ? thinned(good) : good;
  }

  /// Least common multiples of slice_align and the rows of parameters that some slice within the bound cuts more than
  /// once.
  [[nodiscard]] std::set<int64_t> slice_units(std::span<const Item> items) const {
    std::set<int64_t> units{unit_};
    for (const int64_t longer_than : {lowest_, 2 * lowest_, highest_, 2 * highest_}) {
      int64_t unit = unit_;
      for (const Item& item : items) {
        if (item.numel > longer_than) unit = bounded_lcm(unit, item.row);
      }
      if (unit <= highest_) units.insert(unit);
    }
    return units;
  }

  [[nodiscard]] std::set<int64_t> start_points(std::span<const Item> items) const {
    std::set<int64_t> starts{lowest_};
    for (int64_t k = 1; k <= 8; ++k) starts.insert(lowest_ + (highest_ - lowest_) / 8 * k);
    for (int64_t k = 1; k <= 3; ++k) starts.insert(lowest_ + unit_ * k);
    std::set<int64_t> rows;
    for (const Item& item : items) {
      if (rows.size() == kDistinctRows) break;
      if (!is_rigid(item) || !rows.insert(item.row).second) continue;
      starts.insert({lowest_ + item.row, lowest_ + item.row / 2, item.numel, (item.numel + 1) / 2});
    }
    starts.erase(starts.begin(), starts.lower_bound(lowest_));
    starts.erase(starts.upper_bound(highest_), starts.end());
    return starts;
  }

  [[nodiscard]] static bool possible(std::span<const Item> items, int64_t slice) {
    return std::all_of(items.begin(), items.end(),
                       [&](const Item& item) { return item.numel <= 2 * slice || slice % item.row == 0; });
  }

  [[nodiscard]] static std::vector<int64_t> thinned(const std::vector<int64_t>& all) {
    if (all.size() <= kCandidatesOfMany) return all;
    std::vector<int64_t> some;
    for (size_t k = 0; k < kCandidatesOfMany; ++k) some.push_back(all[k * (all.size() - 1) / (kCandidatesOfMany - 1)]);
    return some;
  }

  int64_t world_, align_, unit_;
  int64_t lowest_ = 0, highest_ = 0;
  std::vector<Item> items_;  // rigid ones first, longest rows first
};

/// Whether every border inside the parameter lies between two of its rows.
bool cut_between_rows(const ParamPlacement& p, int64_t slice) {
  const int64_t border = (p.offset / slice + 1) * slice;
  const int64_t end = p.offset + p.numel;
  if (border >= end) return true;
  if ((border - p.offset) % p.row_numel != 0) return false;
  return border + slice >= end || slice % p.row_numel == 0;
}

}  // namespace

void search(Plan& plan) {
  const Result result = Search(plan).run();
  plan.slice_numel = result.grid.slice;
  for (size_t i = 0; i < result.items.size(); ++i) {
    ParamPlacement& p = plan.params[result.items[i].index];
    p.offset = result.offsets[i];
    p.cut = cut_between_rows(p, plan.slice_numel) ? Cut::Rows : Cut::Elements;
  }
}

}  // namespace fsdpp::shard::detail

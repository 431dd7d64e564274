#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fsdpp/shard/plan.h"

/// Inside of the planner: packing for one slice size (plan_pack.cpp) and the search for the slice size
/// (plan_search.cpp).
namespace fsdpp::shard::detail {

inline constexpr int64_t kMaxElements = int64_t{1} << 62;

/// value rounded up or down to a multiple of unit (unit > 0, value >= 0, result < 2^63).
[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
[[nodiscard]] constexpr int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }
/// Least common multiple, kMaxElements when it would be larger than that.
[[nodiscard]] int64_t bounded_lcm(int64_t a, int64_t b);

/// One parameter with elements, for the packer.
struct Item {
  size_t index = 0;   ///< in Plan::params
  int64_t numel = 0;  ///< > 0
  int64_t row = 1;    ///< elements of a row; 1 when it may be cut anywhere
  int64_t step = 1;   ///< lcm(row, param_align): distances from its start to a border inside must be multiples
};

/// The borders: `world` slices of `slice` elements, starts at multiples of `align` (which divides `slice`).
struct Grid {
  int64_t slice = 0;
  int64_t world = 1;
  int64_t align = 1;
  [[nodiscard]] int64_t total() const { return slice * world; }
};

/// The first offset >= from where `item` may lie, or nothing when no offset will do.
[[nodiscard]] std::optional<int64_t> first_offset(int64_t from, const Item& item, const Grid& grid);

/// Places the items in this order, each in the best gap that an earlier one left, else behind the last one. Returns the
/// offset of each item, or nothing when they do not fit.
[[nodiscard]] std::optional<std::vector<int64_t>> pack(std::span<const Item> items, const Grid& grid);

/// Fills plan.slice_numel, and offset and cut of every parameter with elements, from sizes, options and padding_bound.
void search(Plan& plan);

}  // namespace fsdpp::shard::detail

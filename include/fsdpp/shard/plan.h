#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"

/// The layout planner: pure arithmetic from sizes and world size to offsets. See docs/architecture.md "Layout".
namespace fsdpp::shard {

/// One parameter for the planner. A scalar is rows = 1, row_numel = 1. rows or row_numel may be 0.
struct ParamShape {
  int64_t rows = 0;       ///< size of dim 0
  int64_t row_numel = 0;  ///< elements of one row (product of the other dims)
};

/// How a parameter may be cut between ranks.
enum class Cut {
  Rows,      ///< only between rows (or not at all)
  Elements,  ///< inside rows too: its rows are too long to be aligned within the padding bound
};

struct ParamPlacement {
  int64_t offset = 0;  ///< first element in the flat buffer
  int64_t numel = 0;
  int64_t row_numel = 0;
  Cut cut = Cut::Rows;
};

/// Half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  [[nodiscard]] int64_t size() const noexcept { return end - begin; }
  [[nodiscard]] bool operator==(const Range&) const = default;
};

struct PlanOptions {
  int world_size = 1;
  /// Every parameter starts at a multiple of this many elements (16 bytes in the narrowest dtype the buffer is held
  /// in).
  int64_t param_align = 8;
  /// Every slice is a multiple of this many elements (128 bytes in the narrowest dtype).
  int64_t slice_align = 64;
  /// Padding allowed before the planner gives up row cuts for the longest-row parameters: a fraction of the unit …
  double padding_fraction = 1.0 / 32;
  /// … or this many elements for each rank, whichever is larger.
  int64_t padding_per_rank = 1024;
};

/// Layout of one flat buffer: `world_size` equal slices of `slice_numel` elements, rank r owning [r·slice_numel,
/// (r+1)·slice_numel).
///
/// Guarantees: parameters do not overlap, each is contiguous and starts at a multiple of param_align; every slice
/// border that falls inside a Cut::Rows parameter falls between two of its rows; total_numel() = world_size ·
/// slice_numel; padding() ≤ padding_bound, which is
///
///   max(⌊padding_fraction · used_numel⌋, padding_per_rank · world_size)      what the options allow
///   + Σ over parameters of (numel rounded up to param_align − numel)         starts are aligned
///   + slice_align · world_size                                               slices are aligned and equal
///
/// The smallest slice found is taken, so the padding is usually far below: about one of the longest rows for each rank,
/// and at world size 1 no more than the two alignment terms. Where rows can't be aligned within the bound, parameters
/// lose their row cuts one by one, longest rows first; one that then lies within a slice, or is cut between rows by
/// luck, is still Cut::Rows. Placement order is free: offsets need not rise with the index. A parameter without
/// elements has offset 0.
struct FSDPP_API Plan {
  PlanOptions options;
  int64_t slice_numel = 0;
  int64_t used_numel = 0;              ///< sum of the parameters' elements
  int64_t padding_bound = 0;           ///< elements; see above
  std::vector<ParamPlacement> params;  ///< in the order given

  [[nodiscard]] int64_t total_numel() const noexcept { return slice_numel * options.world_size; }
  [[nodiscard]] int64_t padding() const noexcept { return total_numel() - used_numel; }
  /// The part of parameter `param` that rank `rank` owns, in elements of that parameter (begin == end: none). The
  /// ranges of ranks 0, 1, … follow each other and cover the parameter.
  [[nodiscard]] Range local_range(size_t param, int rank) const;
};

/// Plans one buffer. Deterministic; its time depends on the number of parameters, not on the world size. No elements at
/// all: slice 0. Throws ConfigError for world_size < 1, negative sizes, a slice_align that is no multiple of
/// param_align, or 2^62 and more elements (padding bound included).
[[nodiscard]] FSDPP_API Plan make_plan(std::span<const ParamShape> params, const PlanOptions& options);

/// A table of the plan: for each parameter name, offset, elements, cut; slice, padding and bound in elements and
/// percent; with `rows_by_rank` also the rows (or elements) of each rank, at most `max_ranks` of them.
[[nodiscard]] FSDPP_API std::string to_string(const Plan& plan, std::span<const std::string> names,
                                              bool rows_by_rank = false, int max_ranks = 16);

}  // namespace fsdpp::shard

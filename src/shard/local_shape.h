#pragma once
#include <cstdint>
#include <vector>

#include "fsdpp/shard/plan.h"

namespace fsdpp::shard {

/// Shape of the part `range` (elements) of a parameter of shape `global`: [rows, …] for row cuts, [elements] for element cuts.
/// A scalar is [] where it is owned and [0] elsewhere.
inline std::vector<int64_t> local_sizes(std::vector<int64_t> global, Cut cut, Range range) {
  if (global.empty()) return range.size() > 0 ? global : std::vector<int64_t>{0};
  int64_t row = 1;
  for (size_t d = 1; d < global.size(); ++d) row *= global[d];
  if (cut == Cut::Elements) return {range.size()};
  if (row > 0) global[0] = range.size() / row;
  return global;
}

}  // namespace fsdpp::shard

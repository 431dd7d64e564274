#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fsdpp/shard/plan.h"

namespace fsdpp::shard::test {

using Shapes = std::vector<ParamShape>;
using Violations = std::vector<std::string>;

inline std::string at_param(size_t index, const char* what) {
  return "parameter " + std::to_string(index) + ": " + what;
}

/// Every border strictly inside the parameter, one by one.
inline std::vector<int64_t> borders_inside(const Plan& plan, const ParamPlacement& p) {
  std::vector<int64_t> borders;
  for (int64_t b = plan.slice_numel; b < plan.total_numel(); b += plan.slice_numel) {
    if (b > p.offset && b < p.offset + p.numel) borders.push_back(b);
  }
  return borders;
}

inline void check_placement(const Plan& plan, const ParamShape& shape, size_t i, Violations& out) {
  const ParamPlacement& p = plan.params[i];
  if (p.numel != shape.rows * shape.row_numel || p.row_numel != shape.row_numel) out.push_back(at_param(i, "sizes"));
  if (p.offset < 0 || p.offset + p.numel > plan.total_numel()) out.push_back(at_param(i, "outside"));
  if (p.offset % plan.options.param_align != 0) out.push_back(at_param(i, "start not aligned"));
  bool between_rows = true;
  for (const int64_t b : borders_inside(plan, p)) between_rows = between_rows && (b - p.offset) % p.row_numel == 0;
  if ((p.cut == Cut::Rows) != between_rows) out.push_back(at_param(i, "wrong cut"));
}

inline void check_overlap(const Plan& plan, Violations& out) {
  std::vector<ParamPlacement> sorted = plan.params;
  std::erase_if(sorted, [](const ParamPlacement& p) { return p.numel == 0; });
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i - 1].offset + sorted[i - 1].numel > sorted[i].offset) out.push_back("overlap");
  }
}

inline void check_padding(const Plan& plan, const Shapes& shapes, Violations& out) {
  const PlanOptions& o = plan.options;
  int64_t used = 0;
  int64_t bound = o.slice_align * o.world_size;
  for (const ParamShape& s : shapes) {
    const int64_t numel = s.rows * s.row_numel;
    used += numel;
    bound += (numel + o.param_align - 1) / o.param_align * o.param_align - numel;
  }
  bound += std::max(static_cast<int64_t>(std::floor(o.padding_fraction * static_cast<double>(used))),
                    o.padding_per_rank * o.world_size);
  if (plan.used_numel != used) out.push_back("used_numel");
  if (plan.padding_bound != bound) out.push_back("padding_bound");
  if (plan.padding() > bound || plan.padding() < 0) out.push_back("padding");
  if (plan.slice_numel % o.slice_align != 0) out.push_back("slice not aligned");
}

inline void check_ranges(const Plan& plan, size_t i, Violations& out) {
  const ParamPlacement& p = plan.params[i];
  int64_t next = 0;
  for (int rank = 0; rank < plan.options.world_size; ++rank) {
    const Range range = plan.local_range(i, rank);
    if (range.begin != next || range.end < range.begin)
      out.push_back(at_param(i, "range does not follow the one before"));
    next = range.end;
    if (range.size() == 0) continue;
    const bool inside =
        p.offset + range.begin >= rank * plan.slice_numel && p.offset + range.end <= (rank + 1) * plan.slice_numel;
    if (!inside) out.push_back(at_param(i, "range outside its rank's slice"));
  }
  if (next != p.numel) out.push_back(at_param(i, "ranges do not cover it"));
}

/// What is wrong with a plan, worked out border by border and rank by rank; empty when all guarantees of plan.h hold.
inline Violations violations(const Plan& plan, const Shapes& shapes) {
  Violations out;
  if (plan.params.size() != shapes.size()) return {"number of parameters"};
  for (size_t i = 0; i < shapes.size(); ++i) {
    check_placement(plan, shapes[i], i, out);
    check_ranges(plan, i, out);
  }
  check_overlap(plan, out);
  check_padding(plan, shapes, out);
  return out;
}

}  // namespace fsdpp::shard::test

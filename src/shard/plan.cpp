#include "fsdpp/shard/plan.h"

#include <algorithm>
#include <cmath>

#include "base/enforce.h"
#include "shard/plan_pack.h"

namespace fsdpp::shard {
namespace {

using detail::kMaxElements;

void check_options(const PlanOptions& o) {
  FSDPP_ENFORCE(o.world_size >= 1, ConfigError, "make_plan: expected world_size >= 1, got {}", o.world_size);
  FSDPP_ENFORCE(o.param_align >= 1 && o.slice_align >= o.param_align && o.slice_align % o.param_align == 0, ConfigError,
                "make_plan: expected param_align >= 1 and slice_align a multiple of it, got {} and {}", o.param_align,
                o.slice_align);
  FSDPP_ENFORCE(std::isfinite(o.padding_fraction) && o.padding_fraction >= 0 && o.padding_per_rank >= 0, ConfigError,
                "make_plan: expected padding_fraction >= 0 and padding_per_rank >= 0, got {} and {}",
                o.padding_fraction, o.padding_per_rank);
}

int64_t checked(__int128 value) {
  FSDPP_ENFORCE(
      value <= kMaxElements, ConfigError,
      "make_plan: expected at most 2^62 elements with padding, got more. Try: a smaller unit or smaller alignment");
  return static_cast<int64_t>(value);
}

int64_t checked_numel(const ParamShape& shape, size_t index) {
  FSDPP_ENFORCE(shape.rows >= 0 && shape.row_numel >= 0, ConfigError,
                "make_plan: parameter {}: expected sizes >= 0, got {} rows of {} elements", index, shape.rows,
                shape.row_numel);
  return checked(static_cast<__int128>(shape.rows) * shape.row_numel);
}

int64_t padding_bound(const Plan& plan, int64_t align_padding) {
  const PlanOptions& o = plan.options;
  const __int128 by_rank = static_cast<__int128>(o.padding_per_rank) * o.world_size;
  const double fraction = o.padding_fraction * static_cast<double>(plan.used_numel);
  FSDPP_ENFORCE(fraction <= static_cast<double>(kMaxElements), ConfigError,
                "make_plan: expected a padding_fraction that allows at most 2^62 elements, got {}", o.padding_fraction);
  const __int128 allowed = std::max(by_rank, static_cast<__int128>(fraction));
  return checked(allowed + align_padding + static_cast<__int128>(o.slice_align) * o.world_size);
}

}  // namespace

Range Plan::local_range(size_t param, int rank) const {
  const ParamPlacement& p = params.at(param);
  FSDPP_ENFORCE(rank >= 0 && rank < options.world_size, UsageError,
                "Plan::local_range: expected a rank in [0, {}), got {}", options.world_size, rank);
  const int64_t begin = slice_numel * rank - p.offset;
  return {std::clamp<int64_t>(begin, 0, p.numel), std::clamp<int64_t>(begin + slice_numel, 0, p.numel)};
}

Plan make_plan(std::span<const ParamShape> params, const PlanOptions& options) {
  check_options(options);
  Plan plan;
  plan.options = options;
  plan.params.reserve(params.size());
  __int128 used = 0;
  __int128 align_padding = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const int64_t numel = checked_numel(params[i], i);
    plan.params.push_back({0, numel, params[i].row_numel, Cut::Rows});
    used += numel;
    align_padding += (options.param_align - numel % options.param_align) % options.param_align;
  }
  plan.used_numel = checked(used);
  plan.padding_bound = padding_bound(plan, checked(align_padding));
  checked(static_cast<__int128>(plan.used_numel) + plan.padding_bound + 1);
  if (plan.used_numel > 0) detail::search(plan);
  return plan;
}

}  // namespace fsdpp::shard

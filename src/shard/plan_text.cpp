#include <fmt/format.h>

#include <algorithm>

#include "base/enforce.h"
#include "fsdpp/shard/plan.h"

namespace fsdpp::shard {
namespace {

std::string ranks_text(const Plan& plan, size_t param, int max_ranks) {
  const ParamPlacement& p = plan.params[param];
  const int64_t unit = p.cut == Cut::Rows ? std::max<int64_t>(p.row_numel, 1) : 1;
  const int shown = std::min(plan.options.world_size, max_ranks);
  std::string text;
  for (int rank = 0; rank < shown; ++rank) {
    text += fmt::format("{}{}", rank == 0 ? "" : ",", plan.local_range(param, rank).size() / unit);
  }
  if (shown < plan.options.world_size) text += fmt::format(",… ({} ranks)", plan.options.world_size);
  return "  [" + text + "]";
}

double percent_of(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::string to_string(const Plan& plan, std::span<const std::string> names, bool rows_by_rank, int max_ranks) {
  FSDPP_ENFORCE(names.size() == plan.params.size(), UsageError, "to_string(Plan): expected {} names, got {}",
                plan.params.size(), names.size());
  size_t width = 9;
  for (const std::string& name : names) width = std::max(width, name.size());
  std::string text = fmt::format("{:<{}} {:>16} {:>16} {:>12}  {}{}\n", "parameter", width, "offset", "elements", "row",
                                 "cut", rows_by_rank ? "       by rank" : "");
  for (size_t i = 0; i < names.size(); ++i) {
    const ParamPlacement& p = plan.params[i];
    text += fmt::format("{:<{}} {:>16} {:>16} {:>12}  {:<8}", names[i], width, p.offset, p.numel, p.row_numel,
                        p.cut == Cut::Rows ? "rows" : "elements");
    if (rows_by_rank) text += ranks_text(plan, i, max_ranks);
    text += '\n';
  }
  text += fmt::format("{} ranks x slice {} = {} elements: used {}, padding {} ({:.3f} %), bound {} ({:.3f} %)\n",
                      plan.options.world_size, plan.slice_numel, plan.total_numel(), plan.used_numel, plan.padding(),
                      percent_of(plan.padding(), plan.used_numel), plan.padding_bound,
                      percent_of(plan.padding_bound, plan.used_numel));
  return text;
}

}  // namespace fsdpp::shard

#include "fsdpp/profiler/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/enforce.h"
#include "fsdpp/profiler/report.h"

namespace fsdpp::profiler {
namespace {

using nlohmann::json;
using Change = Difference::Verdict;

json summary_of(const std::string& text, const char* which) {
  const json report = json::parse(text, nullptr, false);
  const bool ours = report.is_object() && report.value("schema", "") == "fsdpp.report" && report.contains("summary");
  FSDPP_ENFORCE(ours, UsageError, "diff: expected the {} file to be a report of fsdpp-prof as JSON, got something else",
                which);
  const int version = report.value("version", 0);
  FSDPP_ENFORCE(version == kReportVersion, UsageError,
                "diff: expected format {} in the {} file, got {}. Try: write both with one version.", kReportVersion,
                which, version);
  return report["summary"];
}

std::map<std::string, double> figures_of(const json& summary) {
  std::map<std::string, double> out;
  const std::pair<const char*, const char*> totals[] = {{"step", "step_ms"},
                                                        {"compute", "compute_ms_per_step"},
                                                        {"exposed communication", "exposed_ms_per_step"},
                                                        {"idle", "idle_ms_per_step"},
                                                        {"data loader", "loader_ms_per_step"},
                                                        {"peak memory", "peak_bytes"}};
  for (const auto& [figure, key] : totals) out[figure] = summary.value(key, 0.0);
  const std::pair<const char*, const char*> groups[] = {{"unit ", "units"}, {"kernel ", "kernels"}, {"idle ", "idle"}};
  for (const auto& [prefix, key] : groups) {
    const json group = summary.value(key, json::object());
    for (const auto& [name, value] : group.items()) out[prefix + name] = value.get<double>();
  }
  return out;
}

Change judge_growth(const Difference& d, const CompareOptions& options) {
  const double floor = d.bytes ? options.floor_bytes : options.floor_ms;
  const double growth = d.after - d.before;
  if (std::abs(growth) < floor) return Change::Same;
  if (d.percent() > options.threshold_percent) return Change::Regression;
  return growth < 0 && -growth > options.threshold_percent / 100 * d.before ? Change::Better : Change::Same;
}

int rank_of(Change verdict) { return verdict == Change::Regression ? 0 : verdict == Change::Better ? 1 : 2; }

std::string value_text(const Difference& d, double value) {
  return d.bytes ? fmt::format("{:.1f} MiB", value / (1 << 20)) : fmt::format("{:.3f} ms", value);
}

}  // namespace

double Difference::percent() const {
  if (before == after) return 0;
  if (before == 0) return std::numeric_limits<double>::infinity();
  return 100 * (after - before) / before;
}

bool Comparison::regressed() const {
  return std::any_of(rows.begin(), rows.end(), [](auto& d) { return d.verdict == Change::Regression; });
}

std::string Comparison::text() const {
  std::string out;
  for (const Difference& d : rows) {
    if (d.verdict == Change::Same && d.figure != "step") continue;
    const char* names[] = {"same", "better", "REGRESSION"};
    out += fmt::format("{:<10}  {:>14} -> {:>14}  {:>8}  {}\n", names[static_cast<int>(d.verdict)],
                       value_text(d, d.before), value_text(d, d.after),
                       std::isinf(d.percent()) ? "new" : fmt::format("{:+.1f} %", d.percent()), d.figure);
  }
  return out;
}

Comparison compare(const std::string& before, const std::string& after, const CompareOptions& options) {
  const auto old_figures = figures_of(summary_of(before, "first"));
  const auto new_figures = figures_of(summary_of(after, "second"));
  std::map<std::string, Difference> rows;
  for (const auto& [figure, value] : old_figures) rows[figure].before = value;
  for (const auto& [figure, value] : new_figures) rows[figure].after = value;
  Comparison out;
  for (auto& [figure, d] : rows) {
    d.figure = figure;
    d.bytes = figure == "peak memory";
    d.verdict = judge_growth(d, options);
    out.rows.push_back(d);
  }
  std::stable_sort(out.rows.begin(), out.rows.end(), [](const Difference& a, const Difference& b) {
    return rank_of(a.verdict) != rank_of(b.verdict) ? rank_of(a.verdict) < rank_of(b.verdict)
                                                    : a.percent() > b.percent();
  });
  return out;
}

}  // namespace fsdpp::profiler

#include <fmt/format.h>

#include <algorithm>

#include "base/enforce.h"
#include "profiler/report_json.h"

namespace fsdpp::profiler {
namespace {

std::string percent(const Json& value) { return value.is_number() ? fmt::format("{:.1f}", value.get<double>()) : "-"; }

std::string shortened(const std::string& name, size_t width) {
  return name.size() <= width ? name : name.substr(0, width - 3) + "...";
}

/// The entries of a JSON object of numbers, largest first.
std::vector<std::pair<std::string, double>> by_size(const Json& values) {
  std::vector<std::pair<std::string, double>> out;
  for (const auto& [key, value] : values.items()) out.emplace_back(key, value.get<double>());
  std::stable_sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.second > b.second; });
  return out;
}

std::string time_lines(const Json& rank) {
  const Json& split = rank.at("split");
  std::string out = fmt::format(
      "  window {:.3f} ms: compute {:.3f}, exposed communication {:.3f}, copies {:.3f}, idle {:.3f}\n",
      rank.at("window_ms").get<double>(), split.at("compute_ms").get<double>(), split.at("exposed_ms").get<double>(),
      split.at("copy_ms").get<double>(), split.at("idle_ms").get<double>());
  for (const auto& [cause, time] : by_size(rank.at("idle"))) out += fmt::format("  idle, {}: {:.3f} ms\n", cause, time);
  const Json& loader = rank.at("loader");
  out += fmt::format(
      "  data loader: {} waits, {:.3f} ms, longest {:.3f} ms; {:.3f} ms of them while its threads prepared data, "
      "which took them {:.3f} ms\n",
      loader.at("count").get<int64_t>(), loader.at("total_ms").get<double>(), loader.at("longest_ms").get<double>(),
      loader.at("starved_ms").get<double>(), loader.at("prepare_ms").get<double>());
  return out;
}

std::string unit_lines(const Json& rank) {
  std::string out;
  int rows = 0;
  for (const Json& u : rank.at("units")) {
    if (++rows > 10) break;
    out += fmt::format("  unit {}: communication {:.3f} ms in {} calls, exposed {:.3f} ms\n",
                       u.at("unit").get<std::string>(), u.at("total_ms").get<double>(), u.at("calls").get<int64_t>(),
                       u.at("exposed_ms").get<double>());
  }
  return out;
}

std::string kernel_lines(const Json& rank) {
  std::string out = fmt::format("  {:>6} {:>9} {:>8} {:>7}  {:<15} {:<48} {}\n", "calls", "ms", "compute%", "memory%",
                                "verdict", "kernel", "fix");
  for (const Json& k : rank.at("kernels"))
    out += fmt::format("  {:>6} {:>9.3f} {:>8} {:>7}  {:<15} {:<48} {}\n", k.at("count").get<int64_t>(),
                       k.at("total_ms").get<double>(), percent(k.at("compute_percent")),
                       percent(k.at("memory_percent")), k.at("bound").get<std::string>(),
                       shortened(k.at("name").get<std::string>(), 48), k.at("fix").get<std::string>());
  return out;
}

std::string audit_lines(const Json& rank) {
  const Json& audit = rank.at("audit");
  std::string out = "  audit:";
  for (const auto& [what, count] : audit.at("counts").items())
    out += fmt::format(" {} {},", what, count.get<int64_t>());
  out.back() = '\n';
  for (const Json& e : audit.at("errors")) out += "  ERROR: " + e.get<std::string>() + "\n";
  for (const Json& n : audit.at("notes")) out += "  note: " + n.get<std::string>() + "\n";
  return out;
}

std::string rank_text(const Json& rank) {
  std::string out = fmt::format("rank {} on {}\n  {}\n", rank.at("rank").get<int>(), rank.at("host").get<std::string>(),
                                rank.at("source").at("text").get<std::string>());
  for (const Json& note : rank.at("source").at("notes")) out += "  counters: " + note.get<std::string>() + "\n";
  return out + time_lines(rank) + unit_lines(rank) + kernel_lines(rank) + audit_lines(rank);
}

std::string roofs_text(const Json& roofs) {
  if (!roofs.is_object()) return "roofs: unknown\n";
  return fmt::format("roofs: {:.1f} TFLOP/s, {:.1f} GB/s, ridge at {:.0f} FLOP/B, {}\n",
                     roofs.at("flops_per_s").get<double>() * 1e-12, roofs.at("bytes_per_s").get<double>() * 1e-9,
                     roofs.at("ridge").get<double>(), roofs.at("origin").get<std::string>());
}

}  // namespace

std::string report_text(const std::string& json) {
  try {
    const Json report = Json::parse(json);
    std::string out = fmt::format("{} on {}, {} ranks\n", report.at("title").get<std::string>(),
                                  report.at("device").get<std::string>(), report.at("world_size").get<int>()) +
                      roofs_text(report.at("ceilings"));
    for (const Json& rank : report.at("ranks")) out += rank_text(rank);
    return out;
  } catch (const Json::exception& e) {
    fail<UsageError>("report_text: expected what report_json() made, got something else ({})", e.what());
  }
}

}  // namespace fsdpp::profiler

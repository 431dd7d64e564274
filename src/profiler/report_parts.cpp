#include <algorithm>
#include <cmath>

#include "profiler/report_json.h"

namespace fsdpp::profiler {
namespace {

/// How much of each column of the window something covers, 0 … 1.
class Lane {
 public:
  Lane(Window window, int columns) : window_(window), sums_(static_cast<size_t>(std::max(columns, 1)), 0.0) {}
  void add(int64_t start, int64_t end) {
    const double width = static_cast<double>(window_.length()) / static_cast<double>(sums_.size());
    if (width <= 0 || end <= start) return;
    const double from = static_cast<double>(start - window_.start_ns) / width;
    const double to = static_cast<double>(end - window_.start_ns) / width;
    for (auto c = static_cast<size_t>(std::max(from, 0.0)); c < sums_.size() && static_cast<double>(c) < to; ++c) {
      sums_[c] += std::min(to, static_cast<double>(c + 1)) - std::max(from, static_cast<double>(c));
    }
  }
  /// In thousandths: short in the file and exact enough for a picture.
  [[nodiscard]] Json json() const {
    Json out = Json::array();
    for (const double s : sums_) out.push_back(static_cast<int>(std::lround(1000 * std::clamp(s, 0.0, 1.0))));
    return out;
  }

 private:
  Window window_;
  std::vector<double> sums_;
};

Json roofline_json(const KernelLight& k, const Ceilings& ceilings) {
  const auto p = roofline_point(k, ceilings);
  if (!p) return nullptr;
  return {{"intensity", p->intensity},
          {"flops_per_s", p->flops_per_s},
          {"roof_flops_per_s", p->roof_flops_per_s},
          {"fraction", p->fraction},
          {"memory_side", p->memory_side}};
}

std::string owner_text(const MemoryOwner& owner) { return owner.owner.empty() ? "(no scope)" : owner.owner; }

}  // namespace

Json timeline_json(const Analysis& a, int columns) {
  std::map<std::string, Lane> lanes;
  const auto lane = [&](const std::string& name) -> Lane& {
    return lanes.try_emplace(name, a.window, columns).first->second;
  };
  lane("compute");
  lane("communication");
  for (const Work& w : a.activities) {
    const char* names[] = {"compute", "communication", "copy"};
    lane(names[static_cast<int>(w.kind)]).add(w.start_ns, w.end_ns);
  }
  for (const IdlePiece& p : a.idle) {
    if (p.cause != IdleCause::Copy) lane(std::string("idle: ") + to_string(p.cause)).add(p.start_ns, p.end_ns);
  }
  Json out{{"columns", columns}, {"lanes", Json::object()}, {"steps", Json::array()}};
  for (const auto& [name, values] : lanes) out["lanes"][name] = values.json();
  for (const StepTime& s : a.steps)
    out["steps"].push_back({{"step", s.step}, {"at_ms", ms(s.start_ns - a.window.start_ns)}});
  return out;
}

Json memory_json(const MemoryTimeline& m, int64_t start_ns) {
  Json categories = Json::array(), points = Json::array(), owners = Json::array(), peak = Json::object();
  for (int c = 0; c < kMemoryCategories; ++c) {
    const char* name = to_string(static_cast<MemoryEvent::Category>(c));
    categories.push_back(name);
    peak[name] = m.peak.bytes[static_cast<size_t>(c)];
  }
  for (const MemoryPoint& p : m.points) {
    Json row = Json::array({ms(p.time_ns - start_ns)});
    for (const int64_t b : p.bytes) row.push_back(b);
    points.push_back(std::move(row));
  }
  for (const MemoryOwner& o : m.owners) {
    if (owners.size() == 12) break;
    owners.push_back(
        {{"category", to_string(o.category)}, {"owner", owner_text(o)}, {"bytes", o.bytes}, {"blocks", o.blocks}});
  }
  return {{"categories", std::move(categories)},
          {"bytes_before", m.bytes_before},
          {"peak",
           {{"at_ms", m.points.empty() ? 0.0 : ms(m.peak.time_ns - start_ns)},
            {"total", m.peak.total()},
            {"by_category", std::move(peak)}}},
          {"owners", std::move(owners)},
          {"points", std::move(points)}};
}

Json audit_json(const Trace& trace) {
  const Audit& a = trace.audit;
  Json overheads = Json::object();
  for (const auto& [kind, ns] : a.overhead_ns) overheads[kind] = ms(ns);
  std::vector<std::string> errors = a.errors;
  const std::string none = "no kernel was recorded although kernels were launched";
  if (a.launches > 0 && a.kernels == 0 && errors.empty()) errors.push_back(none);
  return {{"errors", errors},
          {"notes", a.notes},
          {"counts",
           {{"launches", a.launches},
            {"kernels", a.kernels},
            {"graph launches", a.graph_launches},
            {"graph kernels", a.graph_kernels},
            {"launches without kernel", a.launches_without_kernel},
            {"kernels without launch", a.kernels_without_launch},
            {"dropped records", a.dropped_records},
            {"unknown records", a.unknown_records},
            {"truncated buffers", a.truncated_buffers},
            {"refused buffers", a.refused_buffers},
            {"zero stamps", a.zero_stamps},
            {"reversed stamps", a.reversed_stamps},
            {"out of order", a.out_of_order},
            {"outside window", a.outside_window},
            {"cut by window", a.cut_by_window},
            {"calls without operator", a.api_without_op},
            {"clock shift ns", a.clock_shift_ns},
            {"CUPTI errors", a.cupti_errors}}},
          {"overhead_ms", std::move(overheads)}};
}

Json kernels_json(std::span<const KernelLight> kernels, const Analysis& analysis, const Ceilings& ceilings) {
  constexpr size_t kTop = 20;
  Json out = Json::array();
  for (size_t i = 0; i < std::min(kernels.size(), kTop); ++i) {
    const KernelLight& k = kernels[i];
    const Verdict v = judge(k);
    const KernelSummary& s = analysis.kernels[i];
    out.push_back({{"name", k.name},
                   {"op", k.op},
                   {"count", k.count},
                   {"total_ms", ms(k.total_ns)},
                   {"mean_us", k.total_ns * 1e-3 / static_cast<double>(std::max<int64_t>(k.count, 1))},
                   {"min_us", static_cast<double>(s.min_ns) * 1e-3},
                   {"max_us", static_cast<double>(s.max_ns) * 1e-3},
                   {"share", s.share},
                   {"communication", k.communication},
                   {"source", to_string(k.source)},
                   {"compute_percent", or_null(k.compute_percent)},
                   {"memory_percent", or_null(k.memory_percent)},
                   {"occupancy_percent", or_null(k.occupancy_percent)},
                   {"waves", or_null(k.waves)},
                   {"flops", or_null(k.flops)},
                   {"bytes", or_null(k.bytes)},
                   {"idle_before_ms", ms(k.idle_before_ns)},
                   {"bound", to_string(v.bound)},
                   {"fix", v.fix},
                   {"recoverable_ms", ms(v.recoverable_ns)},
                   {"roofline", roofline_json(k, ceilings)}});
  }
  return out;
}

}  // namespace fsdpp::profiler

#include "fsdpp/profiler/report.h"

#include <algorithm>

#include "base/enforce.h"
#include "profiler/report_json.h"

namespace fsdpp::profiler {
namespace {

struct RankReport {
  const Trace* trace;
  Analysis analysis;
  std::vector<KernelLight> kernels;
  LadderChoice source;
  std::vector<std::string> notes;  ///< of the counters
};

double steps_of(const Analysis& a) { return a.steps.empty() ? 1.0 : static_cast<double>(a.steps.size()); }

Ceilings ceilings_of(std::span<const Trace> ranks, const ReportOptions& options) {
  if (options.ceilings.known() || ranks[0].devices.empty()) return options.ceilings;
  return data_sheet_ceilings(ranks[0].devices[0].name);
}

LadderChoice source_of(const RankReport& r, const Counters& counters) {
  std::vector<Rung> rungs = counters.rungs;
  const bool modelled =
      std::any_of(r.kernels.begin(), r.kernels.end(), [](auto& k) { return k.source == Source::Modelled; });
  if (modelled) {
    rungs.push_back({Source::Modelled, true, ""});
  } else if (counters.by_kernel.empty()) {
    rungs.push_back(
        {Source::Modelled, false, "no operator has both shapes and known roofs (record_shapes, with_flops)"});
  }
  return choose_source(rungs);
}

RankReport analyse_rank(const Trace& trace, const Counters& counters, const Ceilings& ceilings,
                        std::span<const CollectiveWait> waits) {
  RankReport r{&trace, analyse(trace), {}, {}, counters.notes};
  r.kernels = speed_of_light(trace, r.analysis, ceilings, counters, waits);
  r.source = source_of(r, counters);
  return r;
}

Json split_json(const TimeSplit& s) {
  return {{"window_ms", ms(s.window_ns)},   {"compute_ms", ms(s.compute_ns)},
          {"exposed_ms", ms(s.exposed_ns)}, {"copy_ms", ms(s.copy_ns)},
          {"idle_ms", ms(s.idle_ns)},       {"communication_ms", ms(s.communication_ns)},
          {"overlap", or_null(s.overlap())}};
}

Json units_json(const Analysis& a) {
  Json out = Json::array();
  for (const UnitCommunication& u : a.units) {
    Json by_op = Json::object();
    for (const auto& [op, ns] : u.exposed_by_op) by_op[op] = ms(ns);
    out.push_back({{"unit", u.unit},
                   {"calls", u.calls},
                   {"bytes", u.bytes},
                   {"total_ms", ms(u.total_ns)},
                   {"exposed_ms", ms(u.exposed_ns)},
                   {"exposed_by_op", std::move(by_op)}});
  }
  return out;
}

Json idle_json(const Analysis& a) {
  Json out = Json::object();
  for (int c = 0; c < kIdleCauses; ++c) {
    if (a.idle_ns[static_cast<size_t>(c)] > 0)
      out[to_string(static_cast<IdleCause>(c))] = ms(a.idle_ns[static_cast<size_t>(c)]);
  }
  return out;
}

Json steps_json(const Analysis& a) {
  Json out = Json::array();
  for (const StepTime& s : a.steps) {
    Json row = split_json(s.split);
    row["step"] = s.step;
    row["loader_ms"] = ms(s.loader_ns);
    out.push_back(std::move(row));
  }
  return out;
}

Json gaps_json(const Analysis& a) {
  Json longest = Json::array();
  for (const LaunchGap& g : a.gaps.longest) {
    longest.push_back(
        {{"at_ms", ms(g.start_ns - a.window.start_ns)}, {"ms", ms(g.length_ns)}, {"kernel", g.kernel}, {"op", g.op}});
  }
  return {{"count", a.gaps.count}, {"total_ms", ms(a.gaps.total_ns)}, {"longest", std::move(longest)}};
}

Json rank_json(const RankReport& r, const Ceilings& ceilings, int columns) {
  const Analysis& a = r.analysis;
  return {{"rank", r.trace->rank},
          {"host", r.trace->host},
          {"device", a.device},
          {"source", {{"label", to_string(r.source.source)}, {"text", r.source.text}, {"notes", r.notes}}},
          {"window_ms", ms(a.window.length())},
          {"split", split_json(a.split)},
          {"idle", idle_json(a)},
          {"units", units_json(a)},
          {"steps", steps_json(a)},
          {"kernels", kernels_json(r.kernels, a, ceilings)},
          {"gaps", gaps_json(a)},
          {"queue",
           {{"max_depth", a.queue.max_depth},
            {"mean_depth", a.queue.mean_depth},
            {"full_count", a.queue.full_count},
            {"full_ms", ms(a.queue.full_ns)}}},
          {"loader",
           {{"count", a.loader.count},
            {"total_ms", ms(a.loader.total_ns)},
            {"longest_ms", ms(a.loader.longest_ns)},
            {"starved_ms", ms(a.loader.starved_ns)},
            {"prepare_count", a.loader.prepare_count},
            {"prepare_ms", ms(a.loader.prepare_ns)}}},
          {"memory", memory_json(a.memory, a.window.start_ns)},
          {"timeline", timeline_json(a, columns)},
          {"audit", audit_json(*r.trace)}};
}

/// Means over ranks of values per step.
class Summary {
 public:
  void add(const Analysis& a) {
    const double n = steps_of(a);
    values_["step_ms"] += ms(a.split.window_ns) / n;
    values_["compute_ms_per_step"] += ms(a.split.compute_ns) / n;
    values_["exposed_ms_per_step"] += ms(a.split.exposed_ns) / n;
    values_["idle_ms_per_step"] += ms(a.split.idle_ns) / n;
    values_["loader_ms_per_step"] += ms(a.loader.total_ns) / n;
    for (const UnitCommunication& u : a.units) units_[u.unit] += ms(u.exposed_ns) / n;
    for (const KernelSummary& k : a.kernels) kernels_[k.name] += ms(k.total_ns) / n;
    for (int c = 0; c < kIdleCauses; ++c) {
      if (const int64_t ns = a.idle_ns[static_cast<size_t>(c)]; ns > 0)
        idle_[to_string(static_cast<IdleCause>(c))] += ms(ns) / n;
    }
    steps_ = std::max(steps_, std::ssize(a.steps));
    communication_ += a.split.communication_ns;
    exposed_ += a.split.exposed_ns;
    peak_ = std::max(peak_, a.memory.peak.total());
    ranks_ += 1;
  }
  [[nodiscard]] Json json() const {
    Json out{{"steps", steps_}};
    for (const auto& [key, value] : values_) out[key] = value / ranks_;
    out["overlap"] = communication_ > 0 ? Json(1 - static_cast<double>(exposed_) / static_cast<double>(communication_))
                                        : Json(nullptr);
    out["peak_bytes"] = peak_;
    out["units"] = means(units_);
    out["kernels"] = means(kernels_);
    out["idle"] = means(idle_);
    return out;
  }

 private:
  using Values = std::map<std::string, double>;
  [[nodiscard]] Json means(const Values& values) const {
    Json out = Json::object();
    for (const auto& [key, value] : values) out[key] = value / ranks_;
    return out;
  }
  Values values_, units_, kernels_, idle_;
  std::ptrdiff_t steps_ = 0;
  int64_t communication_ = 0, exposed_ = 0, peak_ = 0;
  double ranks_ = 0;
};

Json stragglers_json(std::span<const CollectiveWait> waits) {
  Json out = Json::array();
  for (const CollectiveWait& w : waits) {
    if (out.size() == 20 || w.wait_ns == 0) break;
    out.push_back(
        {{"label", w.label}, {"op", w.op}, {"calls", w.calls}, {"wait_ms", ms(w.wait_ns)}, {"rank", w.straggler}});
  }
  return out;
}

}  // namespace

std::string report_json(std::span<const Trace> ranks, const ReportOptions& options) {
  FSDPP_ENFORCE(!ranks.empty(), UsageError, "report: expected at least one trace, got none");
  const Ceilings ceilings = ceilings_of(ranks, options);
  const auto waits = collective_waits(ranks);
  Json list = Json::array();
  Summary summary;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Counters counters = i < options.counters.size() ? options.counters[i] : Counters{};
    const RankReport r = analyse_rank(ranks[i], counters, ceilings, waits);
    summary.add(r.analysis);
    list.push_back(rank_json(r, ceilings, options.timeline_columns));
  }
  Json roofs = nullptr;
  if (ceilings.known()) {
    roofs = {{"flops_per_s", ceilings.flops_per_s},
             {"bytes_per_s", ceilings.bytes_per_s},
             {"ridge", ceilings.ridge()},
             {"origin", ceilings.origin}};
  }
  Json metadata = Json::object();
  for (const auto& [key, value] : ranks[0].metadata)
    metadata[key] = std::visit([](const auto& v) { return Json(v); }, value);
  const Json out{{"schema", "fsdpp.report"},
                 {"version", kReportVersion},
                 {"title", options.title},
                 {"world_size", ranks[0].world_size},
                 {"device", ranks[0].devices.empty() ? "host" : ranks[0].devices[0].name},
                 {"metadata", std::move(metadata)},
                 {"ceilings", std::move(roofs)},
                 {"summary", summary.json()},
                 {"stragglers", stragglers_json(waits)},
                 {"ranks", std::move(list)}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace fsdpp::profiler

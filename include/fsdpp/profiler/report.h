#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/records.h"
#include "fsdpp/profiler/speed_of_light.h"

/// A report that people look at (one HTML file that loads nothing else) and programs read (the same content as JSON).
namespace fsdpp::profiler {

/// Version of the JSON. It grows when a field changes its meaning or goes; new fields alone do not change it.
inline constexpr int kReportVersion = 1;

struct ReportOptions {
  std::string title = "fsdpp profile";
  Ceilings ceilings;               ///< of the device; unknown: NVIDIA's data sheet, if the device is in it
  std::vector<Counters> counters;  ///< by position in `ranks`; missing ones: model and time only
  int timeline_columns = 480;
};

/// The JSON, of all ranks of one window. Fields, all times in ms, all `_per_step` divided by the number of steps (1 if
/// none was marked):
///   schema "fsdpp.report", version, title, world_size, device, metadata, ceilings {flops_per_s, bytes_per_s, ridge,
///   origin}, summary {steps, step_ms, compute_ms_per_step, exposed_ms_per_step, idle_ms_per_step, loader_ms_per_step,
///   overlap,
///     peak_bytes, units {unit: exposed ms per step}, kernels {name: ms per step}, idle {cause: ms per step}}: means
///     over the ranks (peak_bytes: the highest), which compare() reads,
///   stragglers [{label, op, calls, wait_ms, rank}],
///   ranks [{rank, host, device, source {label, text, notes}, window_ms, split {compute_ms, exposed_ms, copy_ms, idle_ms,
///     communication_ms, overlap}, idle {cause: ms}, units [{unit, calls, bytes, total_ms, exposed_ms, exposed_by_op}],
///     steps [...], kernels (the 20 with the most time) [{name, ..., source, bound, fix, roofline}], gaps, queue,
///     loader, memory, timeline, audit}].
/// Any bytes may be in names; what is not UTF-8 becomes U+FFFD. Throws UsageError without ranks.
[[nodiscard]] FSDPP_API std::string report_json(std::span<const Trace> ranks, const ReportOptions& options = {});

/// The page that shows `json`, which must come from report_json(). Works without network, in light and dark.
[[nodiscard]] FSDPP_API std::string report_html(const std::string& json);

/// The report as plain text, of `json` from report_json(): rank by rank the ladder's label, where the time went, exposed
/// communication, the verdict on each of the top kernels with its fix, and what the audit found.
[[nodiscard]] FSDPP_API std::string report_text(const std::string& json);

/// Writes `path` (the page) and, beside it, the JSON under the same name with ".json" for ".html". Each appears whole
/// or not at all. Throws Error where they can't be written.
FSDPP_API void write_report(const std::string& path, std::span<const Trace> ranks, const ReportOptions& options = {});

/// Reads a trace: Chrome's JSON, plain or .gz, of export_chrome_trace() or of PyTorch's profiler, or the bytes of
/// to_bytes(). A merged file gives one trace a rank. Throws Error naming the file and what is wrong with it.
[[nodiscard]] FSDPP_API std::vector<Trace> read_traces(const std::string& path);

}  // namespace fsdpp::profiler

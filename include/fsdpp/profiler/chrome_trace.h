#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/records.h"

/// Traces as files: Chrome's JSON, with the fields that Perfetto, chrome://tracing and HTA read, and a compact form for
/// carrying records between ranks and programs.
namespace fsdpp::profiler {

/// Writes `path`, compressed if it ends in ".gz"; it appears whole or not at all. Strict JSON (UTF-8, no NaN or Infinity:
/// these become strings) for any name; bytes that are not UTF-8 become U+FFFD, and the file counts such names.
/// `ts` is in µs since baseTimeNanoseconds. Events that would overlap on one track are moved to a second one; kernels that
/// would start before their launch keep their times and get no arrow. Throws Error where the file can't be written.
FSDPP_API void export_chrome_trace(const std::string& path, const Trace& trace);

/// All ranks in one file: processes are named by rank, times are rank 0's, and each collective is joined by arrows from its
/// first rank to the others (same comm and sequence).
FSDPP_API void export_chrome_trace(const std::string& path, std::span<const Trace> ranks);

/// What the host did in one step of the trace, and the device's work that it launched, whenever that ran. The audit stays that of
/// the whole window. Throws UsageError if the trace has no such step.
[[nodiscard]] FSDPP_API Trace cut_to_step(Trace trace, int64_t step);

/// The JSON itself.
[[nodiscard]] FSDPP_API std::string chrome_trace_json(std::span<const Trace> ranks);

/// A rank's records as bytes and back. from_bytes throws Error on damaged or foreign bytes.
[[nodiscard]] FSDPP_API std::string to_bytes(const Trace& trace);
[[nodiscard]] FSDPP_API Trace from_bytes(std::string_view bytes);

/// One question to another host's clock: asked and answered at these local times; `remote_ns` was read in between.
struct ClockSample {
  int64_t asked_ns = 0;
  int64_t remote_ns = 0;
  int64_t answered_ns = 0;
};
struct ClockOffset {
  int64_t offset_ns = 0;       ///< to be added to local times for remote ones
  int64_t uncertainty_ns = 0;  ///< half of the shortest round trip
};
/// By the sample with the shortest round trip. Throws UsageError without a sample.
[[nodiscard]] FSDPP_API ClockOffset estimate_clock_offset(std::span<const ClockSample> samples);

/// Collects every rank's bytes on rank 0, in order; elsewhere an empty vector. Collective.
using Gather = std::function<std::vector<std::string>(const std::string& mine)>;

/// Collective: on rank 0 all ranks' records by rank, with align_clocks() done; elsewhere nothing. No shared disk is needed.
/// Throws Error if `gather` brought another number of ranks than world_size.
[[nodiscard]] FSDPP_API std::vector<Trace> gather_traces(const Trace& mine, const Gather& gather);

/// Sets clock_offset_ns of ranks on other hosts than the first trace's, where it is 0, so that collectives of both end
/// together: the median over those that they share. Nothing in common: stays 0.
FSDPP_API void align_clocks(std::span<Trace> ranks);

/// Collective: rank 0 writes `path` with all ranks' records.
FSDPP_API void export_merged_chrome_trace(const std::string& path, const Trace& mine, const Gather& gather);

/// By how much the ranks' ends of one collective differ at most, over all collectives of the traces: what clocks leave
/// unexplained, plus real skew. -1 when no collective is on two ranks.
[[nodiscard]] FSDPP_API int64_t worst_collective_skew_ns(std::span<const Trace> ranks);

}  // namespace fsdpp::profiler

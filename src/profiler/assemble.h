#pragma once
#include <cstdint>
#include <vector>

#include "profiler/device_records.h"
#include "profiler/host_log.h"

namespace fsdpp::profiler {

/// What is known about a window besides its records.
struct RecordedWindow {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int64_t clock_shift_ns = 0;
  std::vector<StepMark> steps;
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_flops = false;
  std::vector<MemoryEvent> known_memory;  ///< held since before it
};

/// One trace of the records of host and device: operators get parents, launches get their operator and scope by thread and
/// time, kernels by their launch (in CUDA graphs by the capture of their node), collectives their kernels, memory its
/// category. Times and numbers of the records are left as they are. Ends with the audit.
[[nodiscard]] Trace assemble(HostRecords host, DeviceRecords device, const RecordedWindow& window);

/// Fills in `trace.audit` from the records; what only sources know (dropped, unknown …) is kept.
void audit(Trace& trace);

/// Forward and Backward spans of each unit, from the scopes before and after them. Times only; no parents.
[[nodiscard]] std::vector<Scope> unit_spans(const std::vector<Scope>& scopes);

}  // namespace fsdpp::profiler

#pragma once
#include <memory>
#include <string>
#include <vector>

#include "profiler/device_records.h"

namespace fsdpp::profiler {

/// Traces the device. begin() and end() wait for it too.
class DeviceSource {
 public:
  virtual ~DeviceSource() = default;
  virtual void begin() = 0;
  virtual void synchronize() = 0;
  virtual DeviceRecords end() = 0;
  /// Why nothing is traced; empty if it is.
  [[nodiscard]] virtual std::string problem() const = 0;
};

/// CUPTI, or one that traces nothing and says why. Attaches to CUPTI at the first call of the process, for its life.
[[nodiscard]] std::unique_ptr<DeviceSource> make_device_source(int64_t buffer_bytes);
/// Keeps the names of launched kernels from here on, or stops. Needs no records, so it goes together with hardware counters.
void log_launches(bool on);
/// Demangled, in the order of the launches since logging began, graphs' left out; empties the log. Nothing without CUPTI.
[[nodiscard]] std::vector<std::string> logged_launches();
/// One that traces nothing.
[[nodiscard]] std::unique_ptr<DeviceSource> make_no_device_source(std::string problem);

}  // namespace fsdpp::profiler

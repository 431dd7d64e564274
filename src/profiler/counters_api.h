#pragma once
// Of CUPTI's headers only counters_*.cpp see these; they are those of the CUDA wheels beside LibTorch.
#include <cuda.h>
#include <cupti_pmsampling.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_range_profiler.h>
#include <cupti_target.h>

#include <string>
#include <vector>

#include "fsdpp/profiler/counters.h"

namespace fsdpp::profiler {

/// Functions of libcupti and libcuda, looked up once per library path.
struct CuptiApi {
// clang-format off
#define FSDPP_CUPTI_FUNCTIONS(X)                                                                                       \
  X(cuptiProfilerInitialize) X(cuptiProfilerDeviceSupported) X(cuptiDeviceGetChipName) X(cuptiProfilerGetCounterAvailability) \
  X(cuptiProfilerHostInitialize) X(cuptiProfilerHostDeinitialize) X(cuptiProfilerHostGetSupportedChips)                \
  X(cuptiProfilerHostGetBaseMetrics) X(cuptiProfilerHostGetMetricProperties) X(cuptiProfilerHostConfigAddMetrics)      \
  X(cuptiProfilerHostGetConfigImageSize) X(cuptiProfilerHostGetConfigImage) X(cuptiProfilerHostGetNumOfPasses)         \
  X(cuptiProfilerHostEvaluateToGpuValues) X(cuptiRangeProfilerEnable) X(cuptiRangeProfilerDisable)                     \
  X(cuptiRangeProfilerSetConfig) X(cuptiRangeProfilerStart) X(cuptiRangeProfilerStop) X(cuptiRangeProfilerDecodeData)  \
  X(cuptiRangeProfilerGetCounterDataSize) X(cuptiRangeProfilerCounterDataImageInitialize)                              \
  X(cuptiRangeProfilerGetCounterDataInfo) X(cuptiPmSamplingGetCounterAvailability) X(cuptiPmSamplingEnable)            \
  X(cuptiPmSamplingDisable) X(cuptiPmSamplingSetConfig) X(cuptiPmSamplingStart) X(cuptiPmSamplingStop)                 \
  X(cuptiPmSamplingDecodeData) X(cuptiPmSamplingGetCounterDataSize) X(cuptiPmSamplingCounterDataImageInitialize)       \
  X(cuptiPmSamplingGetCounterDataInfo) X(cuptiPmSamplingCounterDataGetSampleInfo)
// clang-format on
#define FSDPP_CUPTI_POINTER(name) decltype(&::name) name = nullptr;
  FSDPP_CUPTI_FUNCTIONS(FSDPP_CUPTI_POINTER)
#undef FSDPP_CUPTI_POINTER

  /// Throws ConfigError naming the library or function that is missing. Libraries stay loaded.
  static const CuptiApi& load(const std::string& library);
};

/// A parameter struct as CUPTI wants it: its size filled in, the rest zero.
#define FSDPP_CUPTI_PARAMS(type, name) \
  type name{};                         \
  name.structSize = type##_STRUCT_SIZE

/// Throws ConfigError with the explanation of `result`.
void check_cupti(CUptiResult result, const char* what);
/// Throws ConfigError where CUPTI said that all went well but gave nothing.
void check_given(const void* given, const char* what);
/// Text of the driver's parameters, or empty.
[[nodiscard]] std::string driver_params();

using Bytes = std::vector<uint8_t>;
[[nodiscard]] std::vector<const char*> pointers(const std::vector<std::string>& names);

/// A host object with a set of metrics. CUPTI keeps the pointers to the name of the chip and to the image of available
/// counters (it is not told the image's size, so it has no copy): both live as long as the object.
class HostConfig {
 public:
  HostConfig(const CuptiApi& api, CounterKind kind, std::string chip, Bytes availability);
  ~HostConfig();
  HostConfig(const HostConfig&) = delete;
  HostConfig& operator=(const HostConfig&) = delete;
  /// CUPTI's answer; the image and its passes are valid after success.
  CUptiResult configure(const std::vector<std::string>& metrics);
  [[nodiscard]] const Bytes& image() const noexcept { return image_; }
  [[nodiscard]] int passes() const noexcept { return passes_; }
  [[nodiscard]] CounterValues evaluate(const Bytes& data, size_t index, const std::vector<std::string>& metrics) const;
  [[nodiscard]] CUpti_Profiler_Host_Object* get() const noexcept { return object_; }

 private:
  const CuptiApi& api_;
  std::string chip_;
  Bytes availability_;
  CUpti_Profiler_Host_Object* object_ = nullptr;
  Bytes image_;
  int passes_ = 0;
};

/// The chip of a device, after making sure that the profiling API is initialised and works there. Throws ConfigError where not.
[[nodiscard]] std::string chip_of(const CuptiApi& api, int device, CounterKind kind);
[[nodiscard]] CUcontext current_context();
[[nodiscard]] Bytes range_availability(const CuptiApi& api, CUcontext context);
[[nodiscard]] Bytes pm_availability(const CuptiApi& api, int device);

}  // namespace fsdpp::profiler

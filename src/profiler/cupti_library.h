#pragma once
#include <string>

#include "profiler/cupti_headers.h"

namespace fsdpp::profiler {

#define FSDPP_CUPTI_CALLS(X)                                                                                             \
  X(cuptiGetVersion)                                                                                                     \
  X(cuptiGetResultString)                                                                                                \
  X(cuptiGetTimestamp)                                                                                                   \
  X(cuptiGetCallbackName)                                                                                                \
  X(cuptiSubscribe_v2)                                                                                                   \
  X(cuptiEnableCallback)                                                                                                 \
  X(cuptiGetGraphNodeId)                                                                                                 \
  X(cuptiSetThreadIdType)                                                                                                \
  X(cuptiActivitySetAttribute)                                                                                           \
  X(cuptiActivityRegisterCallbacks)                                                                                      \
  X(cuptiActivityEnable)                                                                                                 \
  X(cuptiActivityDisable)                                                                                                \
  X(cuptiActivityEnableAndDump)                                                                                          \
  X(cuptiActivityEnableRuntimeApi)                                                                                       \
  X(cuptiActivityEnableDriverApi)                                                                                        \
  X(cuptiActivityEnableAllSyncRecords)                                                                                   \
  X(cuptiActivityFlushAll)                                                                                               \
  X(cuptiActivityGetNextRecord)                                                                                          \
  X(cuptiActivityGetNumDroppedRecords)

#define FSDPP_DRIVER_CALLS(X) \
  X(cuInit)                   \
  X(cuDeviceGetCount)         \
  X(cuDriverGetVersion)       \
  X(cuCtxGetCurrent)          \
  X(cuCtxSynchronize)

/// libcupti and libcuda, loaded when first asked for and never unloaded.
struct CuptiLibrary {
#define FSDPP_DECLARE(name) decltype(&::name) name = nullptr;
  FSDPP_CUPTI_CALLS(FSDPP_DECLARE)
  FSDPP_DRIVER_CALLS(FSDPP_DECLARE)
#undef FSDPP_DECLARE
  std::string problem;  ///< why they can't be used; empty if they can

  static const CuptiLibrary& get();

  [[nodiscard]] std::string text(CUptiResult result) const;
  [[nodiscard]] std::string call_name(CUpti_CallbackDomain domain, CUpti_CallbackId id) const;
};

}  // namespace fsdpp::profiler

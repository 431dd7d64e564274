#pragma once
#include "fsdpp/base/export.h"
#include "fsdpp/profiler/speed_of_light.h"

namespace fsdpp::profiler {

/// Roofs measured on a CUDA device that has nothing else to do: the best of several bf16 products of 8192×8192
/// matrices, and the best of several copies of 1 GiB (read and written bytes count). Takes about 0.3 s and 2.4 GB for a
/// moment. Waits for the device; not collective. Throws c10::Error where the memory or the device is missing.
[[nodiscard]] FSDPP_API Ceilings measure_ceilings(int device);

}  // namespace fsdpp::profiler

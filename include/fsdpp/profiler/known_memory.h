#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/records.h"

namespace fsdpp::profiler {

/// The storages of `tensors`, each once, for Options::known_memory. Undefined tensors and those without memory are left
/// out.
[[nodiscard]] FSDPP_API std::vector<MemoryEvent> memory_of(MemoryEvent::Category category,
                                                           const std::vector<at::Tensor>& tensors);

}  // namespace fsdpp::profiler

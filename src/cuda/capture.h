#pragma once
#include <cstdint>

#include "fsdpp/cuda/stream.h"

namespace fsdpp::cuda {

/// A number of its own for each Graph::capture(); 0 if `stream` takes no part in a running one.
[[nodiscard]] uint64_t capture_of(StreamView stream);
/// That number of the running capture; 0 if there is none.
[[nodiscard]] uint64_t running_capture();

}  // namespace fsdpp::cuda

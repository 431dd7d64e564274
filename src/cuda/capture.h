#pragma once
#include <cstdint>

#include "fsdpp/cuda/stream.h"

namespace fsdpp::cuda {

/// A number of its own for each Graph::capture(); 0 if `stream` takes no part in a running one.
[[nodiscard]] uint64_t capture_of(StreamView stream);

}  // namespace fsdpp::cuda

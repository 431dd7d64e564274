#pragma once
#include <ATen/core/Tensor.h>

#include <string_view>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/communicator.h"

namespace fsdpp::comm {

/// A tensor of `sizes` and `dtype`, contiguous, not initialised, in memory from Communicator::allocate, which its storage (so every view of
/// it too) keeps. At least one element. Collective, and freed in the same order on all ranks: see there.
/// `label` names it in errors.
[[nodiscard]] FSDPP_API at::Tensor allocate_tensor(Communicator& comm, at::IntArrayRef sizes, c10::ScalarType dtype,
                                                   std::string_view label = "tensor");

}  // namespace fsdpp::comm

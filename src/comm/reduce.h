#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "fsdpp/comm/communicator.h"

namespace fsdpp::comm {

/// out[i] = inputs[0][i] ⊕ inputs[1][i] ⊕ … in this order; Half and BFloat16 in fp32 with one rounding at the end,
/// other types in their own type. `out` may be one of the inputs. A NaN in any input reaches the output, for Max and
/// Min too.
void reduce_ordered(void* out, std::span<const void* const> inputs, int64_t count, c10::ScalarType dtype, ReduceOp op);

}  // namespace fsdpp::comm

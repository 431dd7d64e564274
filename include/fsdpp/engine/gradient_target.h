#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "fsdpp/base/export.h"

namespace fsdpp {

/// Where a parameter's gradient of the running backward belongs.
struct GradientTarget {
  at::Tensor out;           ///< global shape, contiguous, reduce dtype (one rank: the parameter's own); no autograd history
  bool accumulate = false;  ///< add to what is there; else overwrite all of it
};

/// For autograd functions that can compute a weight's gradient in place, so that nothing is copied before the reduction. Call it inside
/// backward, on the thread and current stream of backward, then write `out` on that stream and return an undefined gradient for the
/// parameter. The call counts as the gradient: write it in any case.
///
/// Nothing where the gradient has to be returned as usual: outside backward, with create_graph, for parameters that no unit manages,
/// with fp16 reduction over several ranks, or while one gradient buffer (UnitHandle::set_reduce_scatter_max_input_buffers) has to be
/// waited for: set two on several ranks.
[[nodiscard]] FSDPP_API std::optional<GradientTarget> gradient_target(const at::Tensor& parameter);

}  // namespace fsdpp

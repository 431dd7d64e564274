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
///
/// `early`: what early_gradient() gave in forward. If nothing else has begun the parameter's gradient since, `out` is the same memory, to
/// be overwritten: scale in place what lies there.
[[nodiscard]] FSDPP_API std::optional<GradientTarget> gradient_target(const at::Tensor& parameter, const at::Tensor& early = {});

/// For autograd functions that compute a weight's gradient in forward already (ops::linear_cross_entropy): the memory that backward would
/// take for it, uninitialised, shaped and typed as GradientTarget::out, so that it is not held twice. Call it in forward, inside the
/// module's call; the memory is given back with the tensor's last copy, unless gradient_target() has taken it over.
///
/// Nothing where gradient_target() would give nothing, in backward (recomputation), for a parameter that shares its unit with others of
/// its kind, that holds a gradient already, or whose memory is out with an earlier forward.
[[nodiscard]] FSDPP_API std::optional<at::Tensor> early_gradient(const at::Tensor& parameter);

}  // namespace fsdpp

#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

/// at::rms_norm over the last dimension, x · weight / sqrt(mean(x²) + eps), in one kernel forward and one backward (and a small
/// sum for the weight), with the weight's gradient written straight into its unit's gradient buffer where there is one
/// (fsdpp::gradient_target). Keeps x and one number a row for backward.
///
/// x: [..., dim], weight: [dim], of one dtype: float32, float64, float16 or bfloat16; dim at most 16384. Arithmetic and the
/// weight's gradient are summed in fp32 (fp64 for float64), so that 16-bit results are those of fp32 rounded once. `eps`: none
/// means the smallest step at 1 of the type that is computed in, 2^-23 or 2^-52, as at::rms_norm. Runs on the current stream.
/// UsageError for other shapes and types, and in a backward with create_graph: not twice differentiable.
[[nodiscard]] FSDPP_API at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, std::optional<double> eps = {});

struct AddRmsNormResult {
  at::Tensor normed;
  at::Tensor sum;
};

/// sum = x + residual, rounded to their dtype, and normed = rms_norm(sum): the residual stream of a transformer without a pass of
/// its own. Backward adds the gradient that arrives at `sum` in the same kernel; x and residual share the result. Keeps `sum`
/// alone. Otherwise as rms_norm; x and residual have one shape.
[[nodiscard]] FSDPP_API AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                                                      std::optional<double> eps = {});

}  // namespace fsdpp::ops

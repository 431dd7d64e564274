#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

/// Linear layers with the activation before them, which keep only what they were given: backward computes the gradient of the
/// activation's result by a product, then one kernel turns it into the gradient of h in its place and makes the result once more
/// for the weight's gradient. That, and the bias', are written straight into their unit's gradient buffer where there is one
/// (fsdpp::gradient_target). Memory in backward: two tensors of h's size (swiglu_linear: three).
///
/// h, gate, up: [..., in]; weight: [out, in]; bias: [out] or undefined; result: [..., out]. One dtype: float32, float64, float16
/// or bfloat16. Activations are computed in fp32 (fp64 for float64) and rounded once. Run on the current stream. UsageError for
/// other shapes and types, and in a backward with create_graph: not twice differentiable.

/// linear(silu(h)), silu(x) = x / (1 + e^-x).
[[nodiscard]] FSDPP_API at::Tensor silu_linear(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias = {});

/// linear(silu(gate) · up), after Shazeer, arXiv 2002.05202. split_linear() makes both without a copy.
[[nodiscard]] FSDPP_API at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                                                 const at::Tensor& bias = {});

}  // namespace fsdpp::ops

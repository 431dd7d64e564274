#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

/// linear(silu(linear(x, up, up_bias)), down, down_bias), a transformer's feed-forward layers. Keeps x and h =
/// linear(x, up, up_bias); backward makes silu(h) once more. Gradients of the weights are written straight into their
/// unit's gradient buffer where there is one (fsdpp::gradient_target). Memory in backward: two tensors of h's size.
///
/// On a GPU of compute capability 9.0, in 16 bits and a build with CUTLASS, silu (without up_bias) and its derivative
/// (where down wants a gradient) are computed on the tiles of the products (kernels/silu_product.h), large ones, dense
/// and with sizes that are multiples of 8: 33 % fewer bytes move between the two layers than with kernels of their own.
/// silu(h) has the same bits either way; the gradient of h is rounded once then, else twice. Autocast does not apply.
///
/// x: [..., in]; up: [width, in]; down: [out, width]; biases: [width] and [out], or undefined; result: [..., out]. One
/// dtype: float32, float64, float16 or bfloat16. Current stream. UsageError for other shapes and types, and in a
/// backward with create_graph: not twice differentiable.
[[nodiscard]] FSDPP_API at::Tensor silu_mlp(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down,
                                            const at::Tensor& up_bias = {}, const at::Tensor& down_bias = {});

}  // namespace fsdpp::ops

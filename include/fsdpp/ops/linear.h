#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

/// at::linear, with a backward that writes the gradients of weight and bias straight into their unit's gradient buffer where there is
/// one (fsdpp::gradient_target): no copy before the reduction, and in the reduce dtype, so fp32 where 16-bit products are summed up.
///
/// x: [..., in]; weight: [out, in]; bias: [out] or undefined; result: [..., out]. One floating dtype. Plain tensors get their gradients as
/// from at::linear. Not twice differentiable: throws UsageError in a backward with create_graph. Autocast does not apply: give 16-bit
/// tensors, as MixedPrecisionPolicy does. UsageError for a bias of another size.
[[nodiscard]] FSDPP_API at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// linear() whose result is cut into `parts` equal ones along the last dimension, each a dense tensor of its own (a product each): query,
/// key and value of a packed projection, whose gradients then need no concatenation. UsageError unless `parts` divides out.
[[nodiscard]] FSDPP_API std::vector<at::Tensor> split_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t parts);

}  // namespace fsdpp::ops

#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

/// The calls of kernels/rms_norm.h that operators share.
namespace fsdpp::ops {

/// What is normalised: x, or its sum with the residual if there is one.
struct NormInput {
  at::Tensor x, residual, weight;
  double eps = 0;
};

/// Checked: UsageError for shapes and types that the kernels don't take, and for a weight that is sharded. No eps: the smallest step at 1
/// of the type that is computed in.
[[nodiscard]] NormInput norm_input(const char* op, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                                   std::optional<double> eps);

struct Normed {
  at::Tensor normed;
  at::Tensor sum;   ///< dense; x itself without a residual
  at::Tensor rstd;  ///< one a row
};
[[nodiscard]] Normed rms_norm_forward(const NormInput& input);

/// The same normed rows once more, from what rms_norm_forward gave. In backward.
[[nodiscard]] at::Tensor rms_norm_again(const at::Tensor& sum, const at::Tensor& weight, double eps);

/// Gradient of the sum into `grad_x`, which may be `grad_normed`; undefined: not wanted. Returns the weight's gradient for autograd,
/// undefined if it is not wanted or was written to its target. `grad_sum`: what arrives at the sum itself, or undefined.
[[nodiscard]] at::Tensor rms_norm_backward(const Normed& saved, const at::Tensor& weight, const at::Tensor& grad_normed,
                                           const at::Tensor& grad_sum, const at::Tensor& grad_x, bool wants_weight);

}  // namespace fsdpp::ops

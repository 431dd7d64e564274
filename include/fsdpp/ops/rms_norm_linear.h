#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

struct RmsNormLinearArgs {
  at::Tensor x;
  at::Tensor residual;     ///< undefined: none
  at::Tensor norm_weight;
  at::Tensor weight;
  at::Tensor bias;         ///< undefined: none
  int64_t parts = 1;       ///< that the result is cut into
  std::optional<double> eps;
};

struct RmsNormLinearResult {
  std::vector<at::Tensor> parts;  ///< each [..., out / parts], dense
  at::Tensor sum;                 ///< x + residual; x itself without a residual
};

/// A norm with the linear layer after it: split_linear(rms_norm(x), weight, bias, parts), or with a residual of
/// add_rms_norm(x, residual), to the bit, gradients too. But the normed rows are not kept for backward, which makes them once more, by
/// the same kernel, for the product that gives the weight's gradient: one tensor of x's size less for one pass over it. Keeps the sum
/// (x) and one number a row.
///
/// x, residual: [..., in]; norm_weight: [in]; weight: [out, in], parts divides out; bias: [out]. Types, eps, streams, where gradients
/// are written, and errors as rms_norm() and split_linear(). Memory in backward: two tensors of x's size.
[[nodiscard]] FSDPP_API RmsNormLinearResult rms_norm_linear(const RmsNormLinearArgs& args);

}  // namespace fsdpp::ops

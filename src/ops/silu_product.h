#pragma once
#include <ATen/core/Tensor.h>

/// SiLU between two linears: computed within the products beside it where kernels/silu_product.h can, else by kernels
/// of its own.
namespace fsdpp::ops {

/// silu(h), or silu(h)·up.
[[nodiscard]] at::Tensor activate(const at::Tensor& h, const at::Tensor& up);

struct Activated {
  at::Tensor h;    ///< linear(x, weight, bias)
  at::Tensor out;  ///< silu(h)
};
[[nodiscard]] Activated activated_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

struct ActivationGradients {
  at::Tensor h, up;
  at::Tensor out;  ///< what activate() gave, if it is wanted
};
/// From the gradient of linear(activate(h, up), weight), as rows. h and up: dense.
[[nodiscard]] ActivationGradients activation_gradients(const at::Tensor& grad_rows, const at::Tensor& weight,
                                                       const at::Tensor& h, const at::Tensor& up, bool wants_out);

}  // namespace fsdpp::ops

#pragma once
#include <ATen/core/Tensor.h>

#include "ops/matrix.h"

/// The products of kernels/silu_product.h as operators `fsdpp::silu_product` and `fsdpp::silu_product_backward`.
namespace fsdpp::ops {

#if FSDPP_CUDA
/// Whether `matrix` ([..., k]) times `weight` with a result of `width` columns is for them: 16 bits, dense and aligned,
/// on a GPU of compute capability 9.0, and large enough to fill it.
[[nodiscard]] bool fused_silu_takes(const at::Tensor& matrix, const at::Tensor& weight, int64_t width);

/// h = x·weightᵀ, a = silu(h). All of two dimensions and dense. REQUIRES: fused_silu_takes(x, weight, h.size(1)).
void fused_silu(const at::Tensor& h, const at::Tensor& a, const at::Tensor& x, const at::Tensor& weight);
/// grad_h = (grad·weight)·silu'(h), a = silu(h). REQUIRES: fused_silu_takes(grad, weight, h.size(1)), h aligned.
void fused_silu_backward(const at::Tensor& grad_h, const at::Tensor& a, const at::Tensor& grad,
                         const at::Tensor& weight, const at::Tensor& h);
#else
inline bool fused_silu_takes(const at::Tensor&, const at::Tensor&, int64_t) { return false; }
inline void fused_silu(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {}
inline void fused_silu_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&) {}
#endif

}  // namespace fsdpp::ops

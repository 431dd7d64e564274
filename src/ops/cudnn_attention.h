#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/ops/attention.h"

/// Attention by cuDNN's fused kernels, from and to packed tensors, which LibTorch's own use of cuDNN does not write. In
/// a build without CUDA or without cuDNN's headers cudnn_takes() is always false. Operators of the dispatcher,
/// `fsdpp::attention` and `fsdpp::attention_gradient`, so that profilers see them.
namespace fsdpp::ops {

/// Whether these kernels exist for such a tensor, [..., seq, 3 · dim]; chooses them in the first call for its shape.
[[nodiscard]] bool cudnn_takes(const at::Tensor& qkv, const AttentionOptions& options, bool with_gradient);

struct CudnnAttention {
  at::Tensor out;    ///< [..., seq, dim]
  at::Tensor stats;  ///< fp32, [batch, heads, seq, 1]: what backward needs to make the softmax again
};

/// REQUIRES: cudnn_takes(qkv, options, …); dense tensors at addresses that 16 divides; options.scale.
[[nodiscard]] CudnnAttention cudnn_attention(const at::Tensor& qkv, const AttentionOptions& options);
/// The gradient of qkv, dense. REQUIRES: cudnn_takes(qkv, options, true), and as above.
[[nodiscard]] at::Tensor cudnn_attention_gradient(const at::Tensor& qkv, const CudnnAttention& forward,
                                                  const at::Tensor& grad_out, const AttentionOptions& options);

}  // namespace fsdpp::ops

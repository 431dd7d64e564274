#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/ops/attention.h"

/// Attention by LibTorch's operators, from a packed tensor, [..., seq, 3 · dim], dense.
namespace fsdpp::ops {

/// at::scaled_dot_product_attention on views of qkv, recorded by autograd. Result: [..., seq, dim].
[[nodiscard]] at::Tensor libtorch_attention(const at::Tensor& qkv, const AttentionOptions& options);

/// The gradient of qkv from that of the result, through operators that are differentiable again; recorded if autograd
/// records now. REQUIRES: qkv.requires_grad().
[[nodiscard]] at::Tensor libtorch_attention_gradient(const at::Tensor& qkv, const at::Tensor& grad_out,
                                                     const AttentionOptions& options);

}  // namespace fsdpp::ops

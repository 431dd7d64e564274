#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

struct AttentionOptions {
  int64_t heads = 0;                           ///< divides dim; must be given
  bool causal = false;                         ///< no token sees those after it
  std::optional<double> scale = std::nullopt;  ///< of the scores; default: 1 / sqrt(dim / heads)
};

/// Multi-head self-attention (Vaswani et al., arXiv 1706.03762) on the packed result of one projection, softmax(scale ·
/// q·kᵀ)·v for each head: the numbers of at::scaled_dot_product_attention, without its layouts. In front lies one
/// linear layer (linear() or rms_norm_linear() with the packed weight) in place of three, behind it one that takes the
/// result as it is, and backward gives one gradient for both products of that linear layer, which three separate ones
/// would have to be copied into.
///
/// qkv: [..., seq, 3 · dim], in each token's row its query, key and value, dim numbers each, heads beside each other; a
/// floating dtype. Result: [..., seq, dim], dense, in the order of tokens. A qkv that isn't dense is copied.
///
/// bfloat16 and float16 on CUDA, heads of a multiple of 8 up to 128 numbers, on the GPUs where LibTorch prefers cuDNN
/// (compute capability 9 and 10): cuDNN's fused kernels, the ones that LibTorch uses. Keeps qkv, the result and one
/// fp32 number for each token and head. Backward takes beside the gradient a tensor of the result's shape in fp32 while
/// it runs; with at::globalContext().deterministicAlgorithms() the scores in 16 bits instead. Kernels are chosen, and
/// some compiled, in the first call with new sizes. A backward with create_graph computes the attention again, by plain
/// operators with the scores whole in memory, and is differentiable. Anything else, or
/// at::globalContext().setSDPUseCuDNN(false): at::scaled_dot_product_attention on views of qkv, with ordinary autograd,
/// differentiable twice where that is (its math backend). If cuDNN itself refuses sizes that it should take, a warning
/// says so once for each, and the same operator runs.
///
/// Runs on the current stream; can be captured in a CUDA graph after a call with the same sizes. UsageError for other
/// shapes and types.
[[nodiscard]] FSDPP_API at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& options);

}  // namespace fsdpp::ops

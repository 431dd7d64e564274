#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

struct EmbeddingOptions {
  /// Tokens with this id add nothing to the gradient, whose row of that number is zero; -1: none.
  int64_t padding_idx = -1;
};

/// at::embedding, with a backward that writes the table's gradient straight into its unit's gradient buffer where there
/// is one (fsdpp::gradient_target): no sort, and no gradient in the table's dtype that is filled, added to and then
/// copied. Backward does not need the table (UnitHandle::set_unshard_in_backward(false)).
///
/// ids: any shape, int64 or int32; weight: [vocab, dim] of float32, float64, float16 or bfloat16; result: [shape of
/// ids…, dim]. Gradients are summed in fp32 (fp64 for float64), in an order that does not change from run to run, and
/// rounded once. Runs on the current stream. UsageError for other shapes and types, for ids outside [0, vocab) on the
/// CPU (on CUDA LibTorch's gather asserts on the device), and in a backward with create_graph: not twice
/// differentiable. LibTorch's scale_grad_by_freq, sparse and max_norm are not offered.
[[nodiscard]] FSDPP_API at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                                             const EmbeddingOptions& options = {});

}  // namespace fsdpp::ops

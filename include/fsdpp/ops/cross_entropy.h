#pragma once
#include <ATen/core/Tensor.h>

#include "fsdpp/base/export.h"

namespace fsdpp::ops {

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;  ///< rows with this target count neither for the loss nor for the mean
  int64_t chunk_rows = 0;       ///< rows of logits in memory at a time; 0: automatic, see below
};

/// The loss of a language model's head, at::cross_entropy_loss(at::linear(x, weight), targets) with reduction mean, in
/// chunks of rows, so that the logits are never whole in memory. When a gradient is wanted, forward computes it too, as
/// long as a chunk's logits are there: one kernel turns them into (softmax - onehot) / 2^k in their place, and two
/// products into gradients of x and of the weight; 2^k: the power of two from n, the number of targets that count,
/// upwards. Backward scales these by 2^k / n and the loss' gradient, unless that is 1 (for float16, which would lose
/// small ones, also by 1 / 2^k): the weight's in its unit's gradient buffer, where it is summed from the start if the
/// weight is alone in its unit (fsdpp::early_gradient), so that there is one copy of it at any time; else straight into
/// that buffer (fsdpp::gradient_target).
///
/// x: [..., dim]; weight: [vocab, dim]; both of one dtype: float32, float64, float16 or bfloat16. targets: int64, one
/// for each row of x, on the same device. Result: scalar, fp32 (float64: fp64), as if computed in fp32 from logits
/// rounded to the dtype. NaN, with gradients of zero, if all targets are ignored. A target that is neither ignore_index
/// nor in [0, vocab): UsageError on the CPU; on CUDA, where reading it would stall the host, the loss and that row's
/// gradient are NaN.
///
/// Memory: chunk · vocab of x's dtype for logits, during the call; with gradients, until backward, x's size and vocab ·
/// dim in fp32 (fp64), unless that is the gradient buffer. The automatic chunk takes no more than the latter (dim · 4 /
/// bytes of the dtype rows, but at least 1024): each further chunk reads and writes the weight's gradient once more.
/// Runs on the current stream. UsageError for other shapes and types, in a backward with create_graph, and in a second
/// backward through one loss: the first has scaled the gradients in place.
[[nodiscard]] FSDPP_API at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                                        const LinearCrossEntropyOptions& options = {});

}  // namespace fsdpp::ops

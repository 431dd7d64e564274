#pragma once
#include <torch/nn/module.h>

#include "fsdpp/base/export.h"

namespace fsdpp::optim {

/// Norm of all gradients of the model as a plain number, the same on every rank: sharded gradients count once each,
/// however many replicas hold them; gradients of unsharded parameters, which must be equal on all ranks, count once.
/// `p` may be any positive order or infinity; the powers are added in double, so orders far above 2 can leave its
/// range. Gradients may live on any device. No gradients: 0. Collective: one all-reduce of one number for each mesh of
/// more than one shard. Blocks the host (it returns a number). Throws ConfigError for another order, UsageError for a
/// gradient that is sparse, not floating point or not shaped like its parameter. On one rank the powers are added in the
/// order of an unsharded model's, so both norms have the same bits; over several ranks they differ by the rounding of sums
/// in double (1e-12 relative). PyTorch's clip_grad_norm_ adds in the gradients' dtype: within 1e-5 for float32.
[[nodiscard]] FSDPP_API double grad_norm(const torch::nn::Module& model, double p = 2.0);

/// Scales the gradients so that their norm is at most `max_norm`: by min(1, max_norm / (norm + 1e-6)), PyTorch's
/// formula. Returns the norm before scaling, as a plain number, the same on every rank. Collective as grad_norm. With
/// `error_if_nonfinite` throws Error on every rank, before any gradient is changed, when the norm is NaN or infinite.
/// So every rank can skip a bad step alike: `if (std::isfinite(clip_grad_norm_(*model, 1.0))) optimizer.step();`
FSDPP_API double clip_grad_norm_(const torch::nn::Module& model, double max_norm, double p = 2.0,
                                 bool error_if_nonfinite = false);

/// Both without waiting: the norm (before scaling) as a tensor of one fp64 element on the first mesh's device, the same values. For steps
/// captured by fsdpp::StepGraph.
[[nodiscard]] FSDPP_API at::Tensor grad_norm_on_device(const torch::nn::Module& model, double p = 2.0);
FSDPP_API at::Tensor clip_grad_norm_on_device_(const torch::nn::Module& model, double max_norm, double p = 2.0);

/// Whether every gradient of the model is finite on every rank, unsharded ones that differ between ranks included: the
/// same answer everywhere. No gradients: true. Collective: for each mesh an all-reduce of one number among its shards
/// and one among its replicas, where there are several. Blocks the host.
[[nodiscard]] FSDPP_API bool grads_are_finite(const torch::nn::Module& model);

}  // namespace fsdpp::optim

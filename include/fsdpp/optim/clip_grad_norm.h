#pragma once
#include <torch/nn/module.h>

#include "fsdpp/base/export.h"

namespace fsdpp::optim {

/// Norm of all gradients of the model (sharded ones counted once each over the mesh, unsharded ones once), as a plain
/// number, the same on every rank. `p` may be any positive order or infinity. No gradients: 0. Collective: one
/// all-reduce of one number. Blocks the host (it returns a number).
[[nodiscard]] FSDPP_API double grad_norm(const torch::nn::Module& model, double p = 2.0);

/// Scales the gradients so that their norm is at most `max_norm`: by min(1, max_norm / (norm + 1e-6)), PyTorch's
/// formula. Returns the norm before scaling, as a plain number, the same on every rank. Collective as grad_norm. With
/// `error_if_nonfinite` throws Error on every rank, before any gradient is changed, when the norm is NaN or infinite.
FSDPP_API double clip_grad_norm_(const torch::nn::Module& model, double max_norm, double p = 2.0,
                                 bool error_if_nonfinite = false);

}  // namespace fsdpp::optim

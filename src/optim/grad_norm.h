#pragma once
#include <cstdint>

#include "optim/model_params.h"

/// clip_grad_norm on lists of parameters. See fsdpp/optim/clip_grad_norm.h for the contract.
namespace fsdpp::optim {

[[nodiscard]] double grad_norm_of(const ModelParams& params, double p);
double clip_grads_of(const ModelParams& params, double max_norm, double p, bool error_if_nonfinite);

}  // namespace fsdpp::optim

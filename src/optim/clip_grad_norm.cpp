#include "fsdpp/optim/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>

#include <cmath>

#include "base/enforce.h"
#include "optim/grad_groups.h"

namespace fsdpp::optim {
namespace {

constexpr const char* kWho = "clip_grad_norm_";

void check_order(double p) {
  FSDPP_ENFORCE(p > 0, ConfigError, "{}: expected an order p > 0 or infinity, got {}", kWho, p);
}

}  // namespace

double clip_grad_norm_(const torch::nn::Module& model, double max_norm, double p, bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  const std::vector<GradGroup> groups = group_gradients(kWho, collect_params(model));
  check_order(p);
  const double norm = global_norm(groups, p);
  FSDPP_ENFORCE(
      !error_if_nonfinite || std::isfinite(norm), Error,
      "{}: expected a finite norm of order {}, got {}. Try: a smaller learning rate, or error_if_nonfinite = false",
      kWho, p, norm);
  const double coefficient = max_norm / (norm + 1e-6);
  scale_all(groups, coefficient > 1.0 ? 1.0 : coefficient);  // NaN stays NaN
  return norm;
}

at::Tensor grad_norm_on_device(const torch::nn::Module& model, double p) {
  const at::NoGradGuard no_grad;
  check_order(p);
  return global_norm_on_device(group_gradients(kWho, collect_params(model)), p);
}

double grad_norm(const torch::nn::Module& model, double p) { return grad_norm_on_device(model, p).item<double>(); }

at::Tensor clip_grad_norm_on_device_(const torch::nn::Module& model, double max_norm, double p) {
  const at::NoGradGuard no_grad;
  const std::vector<GradGroup> groups = group_gradients(kWho, collect_params(model));
  check_order(p);
  const at::Tensor norm = global_norm_on_device(groups, p);
  scale_all(groups, at::full_like(norm, max_norm).div_(norm + 1e-6).clamp_max_(1.0));  // NaN stays NaN
  return norm;
}

bool grads_are_finite(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  return all_finite(group_gradients("grads_are_finite", collect_params(model)));
}

}  // namespace fsdpp::optim

#include "fsdpp/ops/rms_norm.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/norm.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// {normed}, or with a residual {normed, sum}.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                               const std::optional<at::Tensor>& residual, double eps) {
    auto [normed, sum, rstd] = rms_norm_forward({x, residual.value_or(at::Tensor()), weight, eps});
    context->save_for_backward({sum, weight, rstd});
    context->set_materialize_grads(false);
    return residual ? variable_list{normed, sum} : variable_list{normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("rms_norm", "at::rms_norm");
    const bool added = grads.size() > 1;
    const auto grad_normed = dense(grads[0]), grad_sum = added ? dense(grads[1]) : at::Tensor();
    if (!grad_normed.defined()) return {grad_sum, {}, added ? grad_sum : at::Tensor(), {}};
    const bool wants_x = context->needs_input_grad(0) || (added && context->needs_input_grad(2));
    auto grad_x = wants_x ? at::empty_like(grad_normed) : at::Tensor();
    const auto saved = context->get_saved_variables();
    auto grad_weight = rms_norm_backward({{}, saved[0], saved[2]}, saved[1], grad_normed, grad_sum, grad_x, context->needs_input_grad(1));
    return {grad_x, grad_weight, added ? grad_x : at::Tensor(), {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, std::optional<double> eps) {
  const auto in = norm_input("fsdpp::ops::rms_norm", x, {}, weight, eps);
  return RmsNorm::apply(x, weight, std::optional<at::Tensor>(), in.eps)[0];
}

AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                              std::optional<double> eps) {
  const auto in = norm_input("fsdpp::ops::add_rms_norm", x, residual, weight, eps);
  auto results = RmsNorm::apply(x, weight, std::optional<at::Tensor>(residual), in.eps);
  return {results[0], results[1]};
}

}  // namespace fsdpp::ops

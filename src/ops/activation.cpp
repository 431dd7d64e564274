#include "fsdpp/ops/activation.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/product.h"
#include "ops/silu_product.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ActivatedLinear : torch::autograd::Function<ActivatedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& h_given, const at::Tensor& weight,
                            const std::optional<at::Tensor>& up_given, const std::optional<at::Tensor>& bias_given) {
    auto h = dense(h_given), up = dense(up_given.value_or(at::Tensor())), bias = bias_given.value_or(at::Tensor());
    context->save_for_backward({h, weight, up, bias});
    return linear_product(activate(h, up), weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("silu_linear and swiglu_linear", "at::linear(at::silu(h), weight)");
    const auto saved = context->get_saved_variables();
    const auto &h = saved[0], &weight = saved[1], &up = saved[2], &bias = saved[3];
    const auto grad = rows_of(grads[0]);
    const size_t bias_at = up.defined() ? 3 : 2;  // absent tensors are not counted
    const bool wants_weight = context->needs_input_grad(1);
    ActivationGradients gradients;
    if (context->needs_input_grad(0) || (up.defined() && context->needs_input_grad(2)))
      gradients = activation_gradients(grad, weight, h, up, wants_weight);
    else if (wants_weight)
      gradients.out = activate(h, up);
    auto grad_weight = wants_weight ? linear_weight_gradient(weight, grad, rows_of(gradients.out)) : at::Tensor();
    auto grad_bias = bias.defined() && context->needs_input_grad(bias_at) ? linear_bias_gradient(bias, grad) : at::Tensor();
    return {gradients.h, grad_weight, gradients.up, grad_bias};
  }
};

at::Tensor activated_linear(const char* op, const at::Tensor& h, const at::Tensor& up, const at::Tensor& weight,
                            const at::Tensor& bias) {
  expect_alike(op, {h, up, weight, bias});
  FSDPP_ENFORCE(weight.dim() == 2 && h.dim() >= 1 && h.size(-1) == weight.size(1), UsageError,
                "{}: expected the input as [..., in] and the weight as [out, in], got [{}] and [{}]", op,
                fmt::join(h.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  return ActivatedLinear::apply(h, weight, optional(up), optional(bias));
}

}  // namespace

at::Tensor silu_linear(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias) {
  return activated_linear("silu_linear", h, {}, weight, bias);
}

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight, const at::Tensor& bias) {
  FSDPP_ENFORCE(gate.sizes() == up.sizes(), UsageError, "swiglu_linear: expected gate and up of one shape, got [{}] and [{}]",
                fmt::join(gate.sizes(), ", "), fmt::join(up.sizes(), ", "));
  return activated_linear("swiglu_linear", gate, up, weight, bias);
}

}  // namespace fsdpp::ops

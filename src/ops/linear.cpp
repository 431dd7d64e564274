#include "fsdpp/ops/linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "base/enforce.h"
#include "ops/gradients.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Products with the parts of the weight's rows. One part: a plain linear.
struct SplitLinear : torch::autograd::Function<SplitLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias_or_none, int64_t parts) {
    auto bias = bias_or_none.value_or(at::Tensor());
    context->save_for_backward({x, weight, bias});
    context->set_materialize_grads(false);
    return split_products(x, weight, bias, parts);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("linear", "at::linear");
    auto saved = context->get_saved_variables();
    auto &x = saved[0], &weight = saved[1], &bias = saved[2];
    const auto rows = rows_of_each(grads);
    if (!any_defined(rows)) return variable_list(4);
    auto grad_x = context->needs_input_grad(0) ? split_input_gradient(x.sizes(), weight, rows) : at::Tensor();
    auto grad_weight = context->needs_input_grad(1) ? split_weight_gradient(weight, rows, rows_of(x)) : at::Tensor();
    auto grad_bias = bias.defined() && context->needs_input_grad(2) ? split_bias_gradient(bias, rows) : at::Tensor();
    return {grad_x, grad_weight, grad_bias, at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return SplitLinear::apply(x, weight, optional(bias), 1)[0];
}

std::vector<at::Tensor> split_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t parts) {
  expect_parts("split_linear", weight, parts);
  return SplitLinear::apply(x, weight, optional(bias), parts);
}

}  // namespace fsdpp::ops

#include "fsdpp/ops/rms_norm_linear.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/enforce.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/norm.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The parts, and with a residual the sum after them.
struct RmsNormLinear : torch::autograd::Function<RmsNormLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& norm_weight,
                               const at::Tensor& weight, const std::optional<at::Tensor>& residual,
                               const std::optional<at::Tensor>& bias_given, double eps, int64_t parts) {
    auto bias = bias_given.value_or(at::Tensor());
    auto [normed, sum, rstd] = rms_norm_forward({x, residual.value_or(at::Tensor()), norm_weight, eps});
    context->save_for_backward({sum, norm_weight, rstd, weight, bias});
    context->set_materialize_grads(false);
    context->saved_data["eps"] = eps;
    context->saved_data["added"] = residual.has_value();
    auto results = split_products(normed, weight, bias, parts);
    if (residual) results.push_back(sum);
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    expect_first_order("rms_norm_linear", "at::linear(at::rms_norm(x, …), weight)");
    const bool added = context->saved_data["added"].toBool();
    at::Tensor grad_sum;
    if (added) grad_sum = dense(grads.back()), grads.pop_back();
    const auto rows = rows_of_each(grads);
    if (!any_defined(rows)) return result(grad_sum, {}, {}, added, {});
    const auto saved = context->get_saved_variables();
    const at::Tensor &sum = saved[0], &norm_weight = saved[1], &weight = saved[3], &bias = saved[4];
    const bool wants_norm_weight = context->needs_input_grad(1);
    const bool wants_x = context->needs_input_grad(0) || (added && context->needs_input_grad(3));
    auto grad_normed = wants_x || wants_norm_weight ? split_input_gradient(sum.sizes(), weight, rows) : at::Tensor();
    at::Tensor grad_weight, grad_bias, grad_norm_weight;
    if (context->needs_input_grad(2))
      grad_weight = split_weight_gradient(weight, rows, rows_of(rms_norm_again(sum, norm_weight, context->saved_data["eps"].toDouble())));
    if (bias.defined() && context->needs_input_grad(added ? 4 : 3)) grad_bias = split_bias_gradient(bias, rows);
    if (grad_normed.defined())  // in its place: it is nobody else's
      grad_norm_weight = rms_norm_backward({{}, sum, saved[2]}, norm_weight, grad_normed, grad_sum, wants_x ? grad_normed : at::Tensor(),
                                           wants_norm_weight);
    return result(wants_x ? grad_normed : at::Tensor(), grad_norm_weight, grad_weight, added, grad_bias);
  }

  // In the order of forward's arguments; x and the residual share theirs.
  static variable_list result(const at::Tensor& x, const at::Tensor& norm_weight, const at::Tensor& weight, bool added,
                              const at::Tensor& bias) {
    return {x, norm_weight, weight, added ? x : at::Tensor(), bias, {}, {}};
  }
};

}  // namespace

RmsNormLinearResult rms_norm_linear(const RmsNormLinearArgs& args) {
  const auto in = norm_input("fsdpp::ops::rms_norm_linear", args.x, args.residual, args.norm_weight, args.eps);
  const auto& weight = args.weight;
  FSDPP_ENFORCE(weight.dim() == 2 && weight.size(1) == args.x.size(-1), UsageError,
                "rms_norm_linear: expected x as [..., in] and the weight as [out, in], got [{}] and [{}]",
                fmt::join(args.x.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  expect_parts("rms_norm_linear", weight, args.parts);
  auto parts = RmsNormLinear::apply(args.x, args.norm_weight, weight, optional(args.residual), optional(args.bias), in.eps, args.parts);
  auto sum = args.x;
  if (args.residual.defined()) sum = parts.back(), parts.pop_back();
  return {std::move(parts), std::move(sum)};
}

}  // namespace fsdpp::ops

#include "fsdpp/ops/mlp.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/enforce.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/product.h"
#include "ops/silu_product.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Weights {
  at::Tensor up, down, up_bias, down_bias;
};

struct SiluMlp : torch::autograd::Function<SiluMlp> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_given, const at::Tensor& up,
                            const at::Tensor& down, const std::optional<at::Tensor>& up_bias,
                            const std::optional<at::Tensor>& down_bias) {
    const auto x = dense(x_given);
    const Weights w{up, down, up_bias.value_or(at::Tensor()), down_bias.value_or(at::Tensor())};
    auto [h, activated] = activated_product(x, w.up, w.up_bias);
    context->save_for_backward({x, h, w.up, w.down, w.up_bias, w.down_bias});
    return linear_product(activated, w.down, w.down_bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("silu_mlp", "at::linear(at::silu(at::linear(x, up)), down)");
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &h = saved[1];
    const Weights w{saved[2], saved[3], saved[4], saved[5]};
    const Weights wanted = wanted_of(context, w);
    const auto grad = dense(rows_of(grads[0]));
    const bool wants_h = context->needs_input_grad(0) || wanted.up.defined() || wanted.up_bias.defined();
    auto [grad_h, no_up, activated] =
        wants_h ? activation_gradients(grad, w.down, h, {}, wanted.down.defined())
                : ActivationGradients{{}, {}, wanted.down.defined() ? activate(h, {}) : at::Tensor()};
    Weights result;
    if (wanted.down.defined()) result.down = linear_weight_gradient(w.down, grad, rows_of(activated));
    activated.reset();
    if (wanted.down_bias.defined()) result.down_bias = linear_bias_gradient(w.down_bias, grad);
    if (!wants_h) return {{}, {}, result.down, {}, result.down_bias};
    grad_h = rows_of(grad_h);
    auto grad_x = context->needs_input_grad(0) ? split_input_gradient(x.sizes(), w.up, {grad_h}) : at::Tensor();
    if (wanted.up.defined()) result.up = linear_weight_gradient(w.up, grad_h, rows_of(x));
    if (wanted.up_bias.defined()) result.up_bias = linear_bias_gradient(w.up_bias, grad_h);
    return {grad_x, result.up, result.down, result.up_bias, result.down_bias};
  }

  // Those of which a gradient is wanted. Absent arguments are not counted.
  static Weights wanted_of(AutogradContext* context, const Weights& w) {
    auto wanted = [&](size_t at, const at::Tensor& t) {
      return t.defined() && context->needs_input_grad(at) ? t : at::Tensor();
    };
    return {wanted(1, w.up), wanted(2, w.down), wanted(3, w.up_bias), wanted(w.up_bias.defined() ? 4 : 3, w.down_bias)};
  }
};

}  // namespace

at::Tensor silu_mlp(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down, const at::Tensor& up_bias,
                    const at::Tensor& down_bias) {
  for (const auto& weight : {up, down}) expect_memory(weight, "fsdpp::ops::silu_mlp");
  expect_alike("silu_mlp", {x, up, down, up_bias, down_bias});
  FSDPP_ENFORCE(
      up.dim() == 2 && down.dim() == 2 && x.dim() >= 1 && x.size(-1) == up.size(1) && up.size(0) == down.size(1),
      UsageError,
      "silu_mlp: expected x as [..., in], up as [width, in] and down as [out, width], got [{}], [{}] and [{}]",
      fmt::join(x.sizes(), ", "), fmt::join(up.sizes(), ", "), fmt::join(down.sizes(), ", "));
  return SiluMlp::apply(x, up, down, optional(up_bias), optional(down_bias));
}

}  // namespace fsdpp::ops

#include "fsdpp/ops/linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "base/enforce.h"
#include "ops/destination.h"
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
    context->saved_data["parts"] = parts;
    variable_list results;
    int64_t rows = weight.size(0) / parts;
    for (int64_t i = 0; i < parts; ++i) {
      auto part_of = [&](const at::Tensor& t) { return t.defined() && parts > 1 ? t.narrow(0, i * rows, rows) : t; };
      results.push_back(at::linear(x, part_of(weight), part_of(bias)));
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("linear", "at::linear");
    auto saved = context->get_saved_variables();
    auto &x = saved[0], &weight = saved[1], &bias = saved[2];
    std::vector<at::Tensor> rows;
    for (auto& g : grads) rows.push_back(g.defined() ? rows_of(g) : at::Tensor());
    if (std::none_of(rows.begin(), rows.end(), [](auto& g) { return g.defined(); })) return variable_list(4);
    auto grad_x = context->needs_input_grad(0) ? input_gradient(x, weight, rows) : at::Tensor();
    auto grad_weight = context->needs_input_grad(1) ? weight_gradient(x, weight, rows) : at::Tensor();
    auto grad_bias = bias.defined() && context->needs_input_grad(2) ? bias_gradient(bias, rows) : at::Tensor();
    return {grad_x, grad_weight, grad_bias, at::Tensor()};
  }

  static at::Tensor input_gradient(const at::Tensor& x, const at::Tensor& weight, const std::vector<at::Tensor>& grads) {
    at::Tensor sum;
    int64_t rows = weight.size(0) / static_cast<int64_t>(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      auto part = weight.narrow(0, static_cast<int64_t>(i) * rows, rows);
      if (sum.defined())
        sum.addmm_(grads[i], part);
      else
        sum = at::mm(grads[i], part);
    }
    return sum.view(x.sizes());
  }

  static at::Tensor weight_gradient(const at::Tensor& x, const at::Tensor& weight, const std::vector<at::Tensor>& grads) {
    Destination to(weight);
    auto x_rows = rows_of(x);
    for_each_part(to.out, grads, [&](const at::Tensor& out, const at::Tensor& grad) {
      if (grad.defined())
        product_into(out, grad.t(), x_rows, to.accumulate);
      else if (!to.accumulate)
        out.zero_();
    });
    return to.own;
  }

  static at::Tensor bias_gradient(const at::Tensor& bias, const std::vector<at::Tensor>& grads) {
    Destination to(bias);
    for_each_part(to.out, grads, [&](const at::Tensor& out, const at::Tensor& grad) {
      if (grad.defined())
        column_sums_into(out, grad, to.accumulate);
      else if (!to.accumulate)
        out.zero_();
    });
    return to.own;
  }

  template <class F>
  static void for_each_part(const at::Tensor& whole, const std::vector<at::Tensor>& grads, F f) {
    int64_t rows = whole.size(0) / static_cast<int64_t>(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) f(whole.narrow(0, static_cast<int64_t>(i) * rows, rows), grads[i]);
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return SplitLinear::apply(x, weight, optional(bias), 1)[0];
}

std::vector<at::Tensor> split_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t parts) {
  FSDPP_ENFORCE(parts >= 1 && weight.size(0) % parts == 0, UsageError,
                "split_linear: expected a number of parts that divides the {} rows of the weight, got {}", weight.size(0), parts);
  return SplitLinear::apply(x, weight, optional(bias), parts);
}

}  // namespace fsdpp::ops

#include "fsdpp/ops/rms_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "kernels/rms_norm.h"
#include "ops/destination.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& residual) {
  expect_memory(weight, "fsdpp::ops::rms_norm");
  expect_alike("rms_norm", {x, weight, residual});
  FSDPP_ENFORCE(weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0), UsageError,
                "rms_norm: expected x as [..., dim] and the weight as [dim], got [{}] and [{}]", fmt::join(x.sizes(), ", "),
                fmt::join(weight.sizes(), ", "));
  FSDPP_ENFORCE(weight.numel() <= kernels::kMaxRmsNormWidth, UsageError,
                "rms_norm: expected rows of at most {} elements, got {}. Try: at::rms_norm", kernels::kMaxRmsNormWidth,
                weight.numel());
  FSDPP_ENFORCE(!residual.defined() || residual.sizes() == x.sizes(), UsageError,
                "add_rms_norm: expected x and residual of one shape, got [{}] and [{}]", fmt::join(x.sizes(), ", "),
                residual.defined() ? fmt::join(residual.sizes(), ", ") : fmt::join(x.sizes(), ", "));
}

double eps_of(const at::Tensor& x, std::optional<double> eps) {
  if (eps) return *eps;
  return x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : double{std::numeric_limits<float>::epsilon()};
}

int64_t row_count(const at::Tensor& x, int64_t dim) { return dim > 0 ? x.numel() / dim : 0; }

// {normed}, or with a residual {normed, sum}.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x_given, const at::Tensor& weight,
                               const std::optional<at::Tensor>& residual_given, double eps) {
    auto x = dense(x_given), residual = dense(residual_given.value_or(at::Tensor())), scale = dense(weight);
    auto normed = at::empty_like(x), sum = residual.defined() ? at::empty_like(x) : x;
    const auto dim = weight.size(0), rows = row_count(x, dim);
    auto rstd = at::empty({rows}, x.options().dtype(compute_type(x)));
    kernels::RmsNormArgs args{.x = data_of(x), .residual = data_of(residual), .weight = data_of(scale)};
    args.sum = residual.defined() ? data_of(sum) : nullptr;
    args.normed = data_of(normed), args.rstd = data_of(rstd);
    args.dtype = shard::kernel_dtype(x.scalar_type()), args.rows = rows, args.dim = dim, args.eps = eps;
    run("rms_norm", x, args, kernels::rms_norm, kernels::rms_norm_cpu);
    context->save_for_backward({sum, weight, rstd});
    context->set_materialize_grads(false);
    return residual.defined() ? variable_list{normed, sum} : variable_list{normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    expect_first_order("rms_norm", "at::rms_norm");
    const auto grad_normed = dense(grads[0]), grad_sum = grads.size() > 1 ? dense(grads[1]) : at::Tensor();
    if (!grad_normed.defined()) return {grad_sum, {}, grads.size() > 1 ? grad_sum : at::Tensor(), {}};
    const bool wants_x = context->needs_input_grad(0) || (grads.size() > 1 && context->needs_input_grad(2));
    auto grad_x = wants_x ? at::empty_like(grad_normed) : at::Tensor();
    auto grad_weight = run_backward(context->get_saved_variables(), grad_normed, grad_sum, grad_x, context->needs_input_grad(1));
    return {grad_x, grad_weight, grads.size() > 1 ? grad_x : at::Tensor(), {}};
  }

  // Returns the weight's gradient for autograd.
  static at::Tensor run_backward(const variable_list& saved, const at::Tensor& grad_normed, const at::Tensor& grad_sum,
                                 const at::Tensor& grad_x, bool wants_weight) {
    const at::Tensor &sum = saved[0], &weight = saved[1], &rstd = saved[2];
    expect_memory(weight, "the backward of fsdpp::ops::rms_norm");
    auto to = wants_weight ? std::make_optional<Destination>(weight) : std::nullopt;
    auto scale = dense(weight);
    kernels::RmsNormBackwardArgs args{.grad_normed = data_of(grad_normed), .grad_sum = data_of(grad_sum), .sum = data_of(sum)};
    args.weight = data_of(scale), args.rstd = data_of(rstd), args.grad_x = data_of(grad_x);
    args.dtype = shard::kernel_dtype(sum.scalar_type()), args.dim = weight.size(0), args.rows = row_count(sum, args.dim);
    at::Tensor scratch;
    if (to) {
      args.grad_weight = data_of(to->out), args.grad_weight_dtype = shard::kernel_dtype(to->out.scalar_type());
      args.accumulate = to->accumulate;
      if (sum.is_cuda()) {
        const auto bytes = static_cast<int64_t>(kernels::rms_norm_scratch_bytes(args.rows, args.dim, args.dtype));
        scratch = at::empty({bytes}, sum.options().dtype(at::kByte));
        args.scratch = data_of(scratch);
      }
    }
    run("rms_norm_backward", sum, args, kernels::rms_norm_backward, kernels::rms_norm_backward_cpu);
    return to ? to->own : at::Tensor();
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, std::optional<double> eps) {
  check(x, weight, {});
  return RmsNorm::apply(x, weight, std::optional<at::Tensor>(), eps_of(x, eps))[0];
}

AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                              std::optional<double> eps) {
  check(x, weight, residual);
  auto results = RmsNorm::apply(x, weight, std::optional<at::Tensor>(residual), eps_of(x, eps));
  return {results[0], results[1]};
}

}  // namespace fsdpp::ops

#include "ops/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>

#include <limits>

#include "kernels/rms_norm.h"
#include "ops/destination.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

int64_t row_count(const at::Tensor& x, int64_t dim) { return dim > 0 ? x.numel() / dim : 0; }

void run_forward(const NormInput& in, const Normed& out) {
  const auto scale = dense(in.weight);
  kernels::RmsNormArgs args{.x = data_of(in.x), .residual = data_of(in.residual), .weight = data_of(scale)};
  args.sum = in.residual.defined() ? data_of(out.sum) : nullptr;
  args.normed = data_of(out.normed), args.rstd = data_of(out.rstd);
  args.dtype = shard::kernel_dtype(in.x.scalar_type()), args.dim = scale.size(0), args.eps = in.eps;
  args.rows = row_count(in.x, args.dim);
  run("rms_norm", in.x, args, kernels::rms_norm, kernels::rms_norm_cpu);
}

}  // namespace

NormInput norm_input(const char* op, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                     std::optional<double> eps) {
  expect_memory(weight, op);
  expect_alike(op, {x, weight, residual});
  FSDPP_ENFORCE(weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0), UsageError,
                "{}: expected x as [..., dim] and the norm's weight as [dim], got [{}] and [{}]", op, fmt::join(x.sizes(), ", "),
                fmt::join(weight.sizes(), ", "));
  FSDPP_ENFORCE(weight.numel() <= kernels::kMaxRmsNormWidth, UsageError,
                "{}: expected rows of at most {} elements, got {}. Try: at::rms_norm", op, kernels::kMaxRmsNormWidth, weight.numel());
  FSDPP_ENFORCE(!residual.defined() || residual.sizes() == x.sizes(), UsageError,
                "{}: expected x and residual of one shape, got [{}] and [{}]", op, fmt::join(x.sizes(), ", "),
                fmt::join(residual.defined() ? residual.sizes() : x.sizes(), ", "));
  const bool wide = x.scalar_type() == at::kDouble;
  const double smallest = wide ? std::numeric_limits<double>::epsilon() : double{std::numeric_limits<float>::epsilon()};
  return {x, residual, weight, eps.value_or(smallest)};
}

Normed rms_norm_forward(const NormInput& input) {
  NormInput in = input;
  in.x = dense(in.x), in.residual = dense(in.residual);
  Normed out{at::empty_like(in.x), in.residual.defined() ? at::empty_like(in.x) : in.x, {}};
  out.rstd = at::empty({row_count(in.x, in.weight.size(0))}, in.x.options().dtype(compute_type(in.x)));
  run_forward(in, out);
  return out;
}

at::Tensor rms_norm_again(const at::Tensor& sum, const at::Tensor& weight, double eps) {
  expect_memory(weight, "the backward of an fsdpp::ops norm");
  const Normed out{at::empty_like(sum), sum, {}};
  run_forward({sum, {}, weight, eps}, out);
  return out.normed;
}

at::Tensor rms_norm_backward(const Normed& saved, const at::Tensor& weight, const at::Tensor& grad_normed,
                             const at::Tensor& grad_sum, const at::Tensor& grad_x, bool wants_weight) {
  const at::Tensor& sum = saved.sum;
  expect_memory(weight, "the backward of an fsdpp::ops norm");
  auto to = wants_weight ? std::make_optional<Destination>(weight) : std::nullopt;
  auto scale = dense(weight);
  kernels::RmsNormBackwardArgs args{.grad_normed = data_of(grad_normed), .grad_sum = data_of(grad_sum), .sum = data_of(sum)};
  args.weight = data_of(scale), args.rstd = data_of(saved.rstd), args.grad_x = data_of(grad_x);
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

}  // namespace fsdpp::ops

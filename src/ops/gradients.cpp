#include "ops/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "base/enforce.h"
#include "kernels/column_sums.h"
#include "ops/destination.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

// Whether the kernel may write the sums of these columns there, and sums in the type that they are wanted in.
bool has_column_sums_kernel(const at::Tensor& out, const at::Tensor& rows) {
  const bool known = shard::has_kernel_dtype(rows.scalar_type()) && shard::has_kernel_dtype(out.scalar_type());
  const bool here = (rows.is_cpu() || rows.is_cuda()) && out.device() == rows.device();
  return known && here && rows.is_contiguous() && out.is_contiguous() &&
         (out.scalar_type() != at::kDouble || rows.scalar_type() == at::kDouble);
}

void run_column_sums(const at::Tensor& out, const at::Tensor& rows, bool accumulate) {
  kernels::ColumnSumsArgs args{.x = data_of(rows), .dtype = shard::kernel_dtype(rows.scalar_type()), .out = data_of(out)};
  args.out_dtype = shard::kernel_dtype(out.scalar_type()), args.accumulate = accumulate;
  args.rows = rows.size(0), args.columns = rows.size(1);
  at::Tensor scratch;
  if (rows.is_cuda()) {
    const auto bytes = static_cast<int64_t>(kernels::column_sums_scratch_bytes(args.rows, args.columns, args.dtype));
    scratch = at::empty({bytes}, rows.options().dtype(at::kByte));
    args.scratch = data_of(scratch);
  }
  run("column_sums", rows, args, kernels::column_sums, kernels::column_sums_cpu);
}

}  // namespace

at::Tensor rows_of(const at::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  at::Tensor target = out;
  const auto wide = out.scalar_type();
  if (wide == a.scalar_type()) {
    if (accumulate)
      target.addmm_(a, b);
    else
      at::mm_out(target, a, b);
  } else if (out.is_cuda() && wide == at::kFloat) {
    if (accumulate)
      at::addmm_out(target, out, a, b, wide);
    else
      at::mm_out(target, a, b, wide);
  } else if (accumulate) {
    target.add_(at::mm(a.to(wide), b.to(wide)));
  } else {
    at::mm_out(target, a.to(wide), b.to(wide));
  }
}

void column_sums_into(const at::Tensor& out, const at::Tensor& rows, bool accumulate) {
  if (has_column_sums_kernel(out, rows)) return run_column_sums(out, rows, accumulate);
  auto sums = rows.sum(at::IntArrayRef{0}, /*keepdim=*/false, out.scalar_type());
  if (accumulate)
    out.add_(sums);
  else
    out.copy_(sums);
}

at::Tensor linear_weight_gradient(const at::Tensor& weight, const at::Tensor& grad_rows, const at::Tensor& input_rows) {
  Destination to(weight);
  product_into(to.out, grad_rows.t(), input_rows, to.accumulate);
  return to.own;
}

at::Tensor linear_bias_gradient(const at::Tensor& bias, const at::Tensor& grad_rows) {
  Destination to(bias);
  column_sums_into(to.out, grad_rows, to.accumulate);
  return to.own;
}

void expect_first_order(const char* op, const char* alternative) {
  FSDPP_ENFORCE(!c10::GradMode::is_enabled(), UsageError,
                "fsdpp::ops::{} is differentiable once: expected a backward without create_graph. Try: {}.", op, alternative);
}

}  // namespace fsdpp::ops

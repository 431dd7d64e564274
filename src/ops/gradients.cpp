#include "ops/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "base/enforce.h"
#include "kernels/column_sums.h"
#include "ops/destination.h"
#include "ops/kernel_use.h"
#include "ops/product.h"

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

template <class F>
void for_each_part(const at::Tensor& whole, const std::vector<at::Tensor>& grads, F f) {
  const int64_t rows = whole.size(0) / static_cast<int64_t>(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) f(whole.narrow(0, static_cast<int64_t>(i) * rows, rows), grads[i]);
}

const at::Tensor& first_defined(const std::vector<at::Tensor>& tensors) {
  return *std::find_if(tensors.begin(), tensors.end(), [](auto& t) { return t.defined(); });
}

// Of all parts, which are alike.
int64_t columns_of(const std::vector<at::Tensor>& grads) {
  return static_cast<int64_t>(grads.size()) * first_defined(grads).size(1);
}

}  // namespace

at::Tensor rows_of(const at::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

void column_sums_into(const at::Tensor& out, const at::Tensor& rows, bool accumulate) {
  if (has_column_sums_kernel(out, rows)) return run_column_sums(out, rows, accumulate);
  auto sums = rows.sum(at::IntArrayRef{0}, /*keepdim=*/false, out.scalar_type());
  if (accumulate)
    out.add_(sums);
  else
    out.copy_(sums);
}

at::Tensor linear_weight_gradient(const at::Tensor& weight, const at::Tensor& grad_rows, const at::Tensor& input_rows) {
  return split_weight_gradient(weight, {grad_rows}, input_rows);
}
at::Tensor linear_bias_gradient(const at::Tensor& bias, const at::Tensor& grad_rows) { return split_bias_gradient(bias, {grad_rows}); }

void expect_parts(const char* op, const at::Tensor& weight, int64_t parts) {
  FSDPP_ENFORCE(parts >= 1 && weight.size(0) % parts == 0, UsageError,
                "{}: expected a number of parts that divides the {} rows of the weight, got {}", op, weight.size(0), parts);
}

std::vector<at::Tensor> split_products(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t parts) {
  std::vector<at::Tensor> results;
  const int64_t rows = weight.size(0) / parts;
  for (int64_t i = 0; i < parts; ++i) {
    auto part_of = [&](const at::Tensor& t) { return t.defined() && parts > 1 ? t.narrow(0, i * rows, rows) : t; };
    results.push_back(linear_product(x, part_of(weight), part_of(bias)));
  }
  return results;
}

std::vector<at::Tensor> rows_of_each(const std::vector<at::Tensor>& grads) {
  std::vector<at::Tensor> rows;
  for (auto& g : grads) rows.push_back(g.defined() ? rows_of(g) : at::Tensor());
  return rows;
}

bool any_defined(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](auto& t) { return t.defined(); });
}

at::Tensor split_input_gradient(at::IntArrayRef sizes, const at::Tensor& weight, const std::vector<at::Tensor>& grads) {
  expect_memory(weight, "linear");
  at::Tensor sum;
  for_each_part(weight, grads, [&](const at::Tensor& part, const at::Tensor& grad) {
    if (!grad.defined()) return;
    if (sum.defined())
      product_into(sum, grad, part, /*accumulate=*/true);
    else
      sum = product(grad, part);
  });
  return sum.view(sizes);
}

at::Tensor split_weight_gradient(const at::Tensor& weight, const std::vector<at::Tensor>& grads, const at::Tensor& input_rows) {
  Destination to(weight, {columns_of(grads), input_rows.size(1)}, input_rows.options());
  for_each_part(to.out, grads, [&](const at::Tensor& out, const at::Tensor& grad) {
    if (grad.defined())
      product_into(out, grad.t(), input_rows, to.accumulate);
    else if (!to.accumulate)
      out.zero_();
  });
  return to.own;
}

at::Tensor split_bias_gradient(const at::Tensor& bias, const std::vector<at::Tensor>& grads) {
  Destination to(bias, {columns_of(grads)}, first_defined(grads).options());
  for_each_part(to.out, grads, [&](const at::Tensor& out, const at::Tensor& grad) {
    if (grad.defined())
      column_sums_into(out, grad, to.accumulate);
    else if (!to.accumulate)
      out.zero_();
  });
  return to.own;
}

void expect_first_order(const char* op, const char* alternative) {
  FSDPP_ENFORCE(!c10::GradMode::is_enabled(), UsageError,
                "fsdpp::ops::{} is differentiable once: expected a backward without create_graph. Try: {}.", op, alternative);
}

}  // namespace fsdpp::ops

#include "ops/product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <fmt/ranges.h>

#include "base/enforce.h"
#include "ops/cublas_product.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

void product_by_libtorch(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  const auto wide = out.scalar_type();
  if (wide == a.scalar_type()) {
    if (accumulate)
      out.addmm_(a, b);
    else
      at::mm_out(out, a, b);
  } else if (out.is_cuda() && wide == at::kFloat) {
    if (accumulate)
      at::addmm_out(out, out, a, b, wide);
    else
      at::mm_out(out, a, b, wide);
  } else if (accumulate) {
    out.add_(at::mm(a.to(wide), b.to(wide)));
  } else {
    at::mm_out(out, a.to(wide), b.to(wide));
  }
}

}  // namespace

void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  const CublasProduct call{.out = out, .a = a, .b = b, .bias = {}, .accumulate = accumulate};
  if (cublas_takes(call))
    cublas_product(call);
  else
    product_by_libtorch(out, a, b, accumulate);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  auto out = at::empty({a.size(0), b.size(1)}, a.options());
  product_into(out, a, b, /*accumulate=*/false);
  return out;
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  expect_gathered(weight);
  if (bias.defined() && !bias.sizes().equals({weight.size(0)})) {
    expect_memory(weight, "linear"), expect_memory(bias, "linear");  // else of sharded ones these are the shards' sizes
    fail<UsageError>("linear: expected a bias of [{}], a value for each row of the weight, got [{}]", weight.size(0),
                     fmt::join(bias.sizes(), ", "));
  }
  if (!cublas_takes_linear(x, weight, bias)) return at::linear(x, weight, optional(bias));
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  auto out = at::empty(sizes, x.options());
  cublas_product({.out = rows_of(out), .a = rows_of(x), .b = weight, .bias = bias, .b_transposed = true});
  return out;
}

}  // namespace fsdpp::ops

#include "ops/silu_product.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/activation.h"
#include "ops/fused_silu.h"
#include "ops/gradients.h"
#include "ops/kernel_use.h"
#include "ops/product.h"

namespace fsdpp::ops {
namespace {

// `grad_out` becomes the gradient of h.
ActivationGradients activation_backward(const at::Tensor& grad_out, const at::Tensor& h, const at::Tensor& up,
                                        bool wants_out) {
  ActivationGradients result{grad_out, up.defined() ? at::empty_like(up) : up,
                             wants_out ? at::empty_like(h) : at::Tensor()};
  kernels::SiluBackwardArgs args{.grad_out = data_of(grad_out), .h = data_of(h), .up = data_of(up)};
  args.grad_h = data_of(result.h), args.grad_up = data_of(result.up), args.out = data_of(result.out);
  args.dtype = shard::kernel_dtype(h.scalar_type()), args.numel = h.numel();
  run("silu_backward", h, args, kernels::silu_backward, kernels::silu_backward_cpu);
  return result;
}

}  // namespace

at::Tensor activate(const at::Tensor& h, const at::Tensor& up) {
  auto out = at::empty_like(h);
  const kernels::SiluArgs args{data_of(out), data_of(h), data_of(up), shard::kernel_dtype(h.scalar_type()), h.numel()};
  run("silu", h, args, kernels::silu, kernels::silu_cpu);
  return out;
}

Activated activated_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  expect_gathered(weight);
  if (bias.defined() || !fused_silu_takes(x, weight, weight.size(0))) {
    auto h = linear_product(x, weight, bias);
    return {h, activate(h, {})};
  }
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  Activated result{at::empty(sizes, x.options()), at::empty(sizes, x.options())};
  fused_silu(rows_of(result.h), rows_of(result.out), rows_of(x), weight);
  return result;
}

ActivationGradients activation_gradients(const at::Tensor& grad_rows, const at::Tensor& weight, const at::Tensor& h,
                                         const at::Tensor& up, bool wants_out) {
  expect_gathered(weight);
  if (up.defined() || !wants_out || !is_aligned(h) || !fused_silu_takes(grad_rows, weight, weight.size(1)))
    return activation_backward(product(grad_rows, weight).view(h.sizes()), h, up, wants_out);
  ActivationGradients result{at::empty_like(h), {}, at::empty_like(h)};
  fused_silu_backward(rows_of(result.h), rows_of(result.out), grad_rows, weight, rows_of(h));
  return result;
}

}  // namespace fsdpp::ops

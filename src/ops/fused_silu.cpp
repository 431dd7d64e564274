#include "ops/fused_silu.h"

#include <ATen/cuda/CUDAContextLight.h>

#include "comm/collective_use.h"
#include "kernels/silu_product.h"
#include "ops/cuda_operator.h"
#include "ops/kernel_use.h"

namespace fsdpp::ops {
namespace {

template <class Args>
void launch(const char* what, const at::Tensor& on, Args args, int (*kernel)(const Args&, CUstream_st*)) {
  if (comm::has_collectives()) args.blocks_per_processor = 4;  // of 1, 2, 4, 8 the best on two H200: 1.4 % of a step
  shard::run_kernel(
      what, cuda::current_stream(on.device()), [&](auto stream) { return kernel(args, stream); }, [] {});
}

void run_silu_product(const at::Tensor& h, const at::Tensor& a, const at::Tensor& x, const at::Tensor& weight) {
  kernels::SiluProductArgs args{.x = data_of(x), .weight = data_of(weight), .h = data_of(h), .a = data_of(a)};
  args.dtype = shard::kernel_dtype(x.scalar_type()), args.rows = x.size(0), args.in = x.size(1), args.width = h.size(1);
  launch("silu_product", x, args, kernels::silu_product);
}

void run_silu_product_backward(const at::Tensor& grad_h, const at::Tensor& a, const at::Tensor& grad,
                               const at::Tensor& weight, const at::Tensor& h) {
  kernels::SiluProductBackwardArgs args{
      .grad = data_of(grad), .weight = data_of(weight), .h = data_of(h), .grad_h = data_of(grad_h)};
  args.a = data_of(a), args.dtype = shard::kernel_dtype(grad.scalar_type()), args.rows = grad.size(0),
  args.out = grad.size(1), args.width = h.size(1);
  launch("silu_product_backward", grad, args, kernels::silu_product_backward);
}

bool is_dense(const at::Tensor& t) { return t.is_contiguous() && is_aligned(t); }

}  // namespace

bool fused_silu_takes(const at::Tensor& matrix, const at::Tensor& weight, int64_t width) {
  if (!kernels::has_silu_products() || !is_half_on_cuda(matrix) || !is_like(weight, matrix) || matrix.numel() == 0)
    return false;
  const auto* gpu = at::cuda::getDeviceProperties(matrix.device().index());
  const int64_t k = matrix.size(-1), tiles = matrix.numel() / k * width / (128 * 128);
  return gpu->major == 9 && gpu->minor == 0 && tiles >= 2 * gpu->multiProcessorCount && k % 8 == 0 && width % 8 == 0 &&
         is_dense(matrix) && is_dense(weight);
}

void fused_silu(const at::Tensor& h, const at::Tensor& a, const at::Tensor& x, const at::Tensor& weight) {
  static const auto run = register_cuda_operator<&run_silu_product>(
      "silu_product", "(Tensor(a!) h, Tensor(b!) a, Tensor x, Tensor weight) -> ()");
  run.call(h, a, x, weight);
}

void fused_silu_backward(const at::Tensor& grad_h, const at::Tensor& a, const at::Tensor& grad,
                         const at::Tensor& weight, const at::Tensor& h) {
  static const auto run = register_cuda_operator<&run_silu_product_backward>(
      "silu_product_backward", "(Tensor(a!) grad_h, Tensor(b!) a, Tensor grad, Tensor weight, Tensor h) -> ()");
  run.call(grad_h, a, grad, weight, h);
}

}  // namespace fsdpp::ops

#include "kernels/silu_product.h"

#include "kernels/cuda/silu_product_launch.h"

namespace fsdpp::kernels {

bool has_silu_products() noexcept { return true; }

int silu_product(const SiluProductArgs& args, CUstream_st* stream) {
  return args.dtype == DType::F16 ? silu_product_f16(args, stream) : silu_product_bf16(args, stream);
}

int silu_product_backward(const SiluProductBackwardArgs& args, CUstream_st* stream) {
  return args.dtype == DType::F16 ? silu_product_backward_f16(args, stream) : silu_product_backward_bf16(args, stream);
}

}  // namespace fsdpp::kernels

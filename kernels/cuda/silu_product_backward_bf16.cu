#include "kernels/cuda/silu_product.cuh"
#include "kernels/cuda/silu_product_launch.h"

namespace fsdpp::kernels {
int silu_product_backward_bf16(const SiluProductBackwardArgs& args, CUstream_st* stream) {
  return launch<cutlass::bfloat16_t>(args, stream);
}
}  // namespace fsdpp::kernels

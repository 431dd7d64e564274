#pragma once
#include "kernels/silu_product.h"

/// One source for each, since each takes a minute to compile.
namespace fsdpp::kernels {
int silu_product_bf16(const SiluProductArgs& args, CUstream_st* stream);
int silu_product_f16(const SiluProductArgs& args, CUstream_st* stream);
int silu_product_backward_bf16(const SiluProductBackwardArgs& args, CUstream_st* stream);
int silu_product_backward_f16(const SiluProductBackwardArgs& args, CUstream_st* stream);
}  // namespace fsdpp::kernels

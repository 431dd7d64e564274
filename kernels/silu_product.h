#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

struct CUstream_st;

/// Matrix products with SiLU computed on the tiles of the result, for GPUs of compute capability 9.0, by CUTLASS.
/// Matrices lie dense by rows, aligned to 16 bytes; `in`, `out` and `width` are multiples of 8. BF16 or F16, summed in
/// fp32, each result rounded once. `blocks_per_processor`: thread blocks, one of which fits a multiprocessor at a time.
/// 1: each has an equal share of the tiles, the fastest where all multiprocessors are free. More: smaller shares, for
/// where other kernels hold some of them. What they compute in other words: a product, then kernels::silu or
/// kernels::silu_backward (kernels/activation.h).
namespace fsdpp::kernels {

/// Whether this build has them: with CUTLASS, and for compute capability 9.0.
[[nodiscard]] bool has_silu_products() noexcept;

/// Both launchers queue on `stream` and return a cudaError_t: cudaErrorNotSupported without has_silu_products().

/// h = x·weightᵀ, a = silu(h) of the rounded h.
struct SiluProductArgs {
  const void* x = nullptr;       ///< [rows, in]
  const void* weight = nullptr;  ///< [width, in]
  void* h = nullptr;             ///< [rows, width]
  void* a = nullptr;             ///< [rows, width]
  DType dtype = DType::BF16;
  int64_t rows = 0, in = 0, width = 0;
  int blocks_per_processor = 1;
};
int silu_product(const SiluProductArgs& args, CUstream_st* stream);

/// grad_h = (grad·weight)·silu'(h), and a = silu(h) once more.
struct SiluProductBackwardArgs {
  const void* grad = nullptr;    ///< [rows, out]
  const void* weight = nullptr;  ///< [out, width]
  const void* h = nullptr;       ///< [rows, width]
  void* grad_h = nullptr;        ///< [rows, width]; may be h
  void* a = nullptr;             ///< [rows, width]
  DType dtype = DType::BF16;
  int64_t rows = 0, out = 0, width = 0;
  int blocks_per_processor = 1;
};
int silu_product_backward(const SiluProductBackwardArgs& args, CUstream_st* stream);

}  // namespace fsdpp::kernels

#pragma once
#include "kernels/dtype.h"

/// SiLU (Hendrycks & Gimpel, arXiv 1606.08415), silu(x) = x / (1 + e^−x), and its gated form (Shazeer, arXiv
/// 2002.05202), over flat arrays of one dtype; arithmetic is in compute_type(dtype). As in kernels.h, CUDA launchers
/// queue on `stream` and return a cudaError_t as int; each has a CPU twin. On CUDA 16-bit types use the hardware's
/// exponential and division, whose errors vanish in the rounding of the result (and results below 2e-36 may be 0).
/// Outputs may be the very array of an input, not overlap it otherwise.
namespace fsdpp::kernels {

/// out = silu(h); with `up`: out = silu(h) · up.
struct SiluArgs {
  void* out = nullptr;
  const void* h = nullptr;
  const void* up = nullptr;  ///< null: not gated
  DType dtype = DType::F32;
  int64_t numel = 0;
};
int silu(const SiluArgs& args, CUstream_st* stream);
void silu_cpu(const SiluArgs& args);

/// grad_h = grad_out · silu'(h), and out = silu(h) once more (the same bits), for a weight's gradient. With `up`:
///   grad_h = grad_out · up · silu'(h);  grad_up = grad_out · silu(h);  out = silu(h) · up
/// silu'(x) = s · (1 + x · (1 − s)) with s = 1 / (1 + e^−x).
struct SiluBackwardArgs {
  const void* grad_out = nullptr;
  const void* h = nullptr;
  const void* up = nullptr;  ///< null: not gated
  void* grad_h = nullptr;
  void* grad_up = nullptr;  ///< wanted exactly if there is `up`
  void* out = nullptr;      ///< null: not wanted
  DType dtype = DType::F32;
  int64_t numel = 0;
};
int silu_backward(const SiluBackwardArgs& args, CUstream_st* stream);
void silu_backward_cpu(const SiluBackwardArgs& args);

}  // namespace fsdpp::kernels

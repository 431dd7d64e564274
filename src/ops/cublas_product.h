#pragma once
#include <ATen/core/Tensor.h>

/// Products of 16-bit matrices by cuBLASLt, called directly: LibTorch has no call that adds to or stores fp32 and takes
/// a bias, and none that chooses the schedule of the tiles (see has_fixed_shares). An operator of the dispatcher,
/// `fsdpp::product`, so that the use guard and profilers see it.
namespace fsdpp::ops {

/// out = a·b + bias, or out += a·b. out: [m, n], rows contiguous, of a's dtype or fp32; a: [m, k]; b: [k, n], or
/// `b_transposed`: [n, k]; bias: [n] of out's dtype, or undefined. Runs on the current stream.
struct CublasProduct {
  at::Tensor out, a, b, bias;
  bool b_transposed = false;
  bool accumulate = false;
};

#if FSDPP_CUDA
/// bf16 or fp16 on one GPU of compute capability 8 or newer, nothing empty, all rows or all columns contiguous and
/// aligned to 16 bytes.
[[nodiscard]] bool cublas_takes(const CublasProduct& call);
/// The same for x: [..., k] and weight: [n, k].
[[nodiscard]] bool cublas_takes_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
/// REQUIRES: one of the above. Throws CudaError where cuBLASLt fails.
void cublas_product(const CublasProduct& call);
#else
inline bool cublas_takes(const CublasProduct&) { return false; }
inline bool cublas_takes_linear(const at::Tensor&, const at::Tensor&, const at::Tensor&) { return false; }
inline void cublas_product(const CublasProduct&) {}
#endif

}  // namespace fsdpp::ops

#pragma once
#include "kernels/dtype.h"

/// Root mean square norm of rows (Zhang & Sennrich, arXiv 1910.07467), with the residual addition before it. Arrays are
/// dense [rows, dim] of one dtype, weights [dim]; arithmetic is in compute_type(dtype). As in kernels.h, CUDA launchers
/// queue on `stream` and return a cudaError_t as int; each has a CPU twin. Same input, same bits.
namespace fsdpp::kernels {

/// A row is kept in registers, so there is a widest one (CUDA; cudaErrorInvalidValue beyond).
inline constexpr int64_t kMaxRmsNormWidth = 16384;

///   sum = x + residual, rounded to dtype;  rstd = 1 / sqrt(mean(sum²) + eps);  normed = sum · rstd · weight
/// Without `residual` x takes the place of sum and `sum` is not written.
struct RmsNormArgs {
  const void* x = nullptr;
  const void* residual = nullptr;
  const void* weight = nullptr;
  void* sum = nullptr;
  void* normed = nullptr;
  void* rstd = nullptr;  ///< [rows] of compute_type(dtype); null: not wanted
  DType dtype = DType::F32;
  int64_t rows = 0;
  int64_t dim = 0;
  double eps = 0;
};
int rms_norm(const RmsNormArgs& args, CUstream_st* stream);
void rms_norm_cpu(const RmsNormArgs& args);

///   d = grad_normed · weight;  grad_x = rstd · (d − sum · rstd² · mean(d · sum)) + grad_sum
///   grad_weight = Σ over rows of grad_normed · sum · rstd  (+= with `accumulate`)
/// grad_x is the gradient of sum, so of x and of the residual; it may be grad_normed or grad_sum. Two launches.
struct RmsNormBackwardArgs {
  const void* grad_normed = nullptr;
  const void* grad_sum = nullptr;  ///< null: zero
  const void* sum = nullptr;
  const void* weight = nullptr;
  const void* rstd = nullptr;
  void* grad_x = nullptr;       ///< null: not wanted
  void* grad_weight = nullptr;  ///< null: not wanted
  DType grad_weight_dtype = DType::F32;
  bool accumulate = false;
  void* scratch = nullptr;  ///< rms_norm_scratch_bytes() of device memory if grad_weight is wanted; the CPU needs none
  DType dtype = DType::F32;
  int64_t rows = 0;
  int64_t dim = 0;
};
[[nodiscard]] size_t rms_norm_scratch_bytes(int64_t rows, int64_t dim, DType dtype);
int rms_norm_backward(const RmsNormBackwardArgs& args, CUstream_st* stream);
void rms_norm_backward_cpu(const RmsNormBackwardArgs& args);

}  // namespace fsdpp::kernels

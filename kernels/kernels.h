#pragma once
#include "kernels/dtype.h"

/// Flat-buffer kernels. No LibTorch here: raw pointers and sizes in, an error code out. Each has a CPU twin with the
/// same arithmetic, which is also the reference in tests. CUDA launchers queue on `stream`, never synchronise, allocate
/// nothing, and return a cudaError_t as int (0 = success). Pointers of a CUDA launcher are device pointers unless said
/// otherwise.
namespace fsdpp::kernels {

/// dst[i] = cast(scale · src[i]), or dst[i] += … with `accumulate`; arithmetic in fp32 (fp64 if either side is F64).
/// dst == src is allowed when the dtypes are equal; otherwise the ranges must not overlap.
struct CastArgs {
  void* dst = nullptr;
  DType dst_dtype = DType::F32;
  const void* src = nullptr;
  DType src_dtype = DType::F32;
  int64_t numel = 0;
  double scale = 1.0;
  bool accumulate = false;
};
int cast(const CastArgs& args, CUstream_st* stream);
void cast_cpu(const CastArgs& args);

/// One piece of a pack: `numel` elements at `src` go to dst[offset …). A null `src` writes zeros.
struct PackPiece {
  const void* src = nullptr;
  int64_t offset = 0;
  int64_t numel = 0;
};
/// Writes many contiguous tensors of one dtype into one flat buffer, dst = cast(scale · src) (+= with `accumulate`,
/// zero pieces then change nothing). Pieces (a host array, read before the call returns) must not overlap. One launch
/// for up to kMaxPackPieces pieces, more launches beyond.
inline constexpr int kMaxPackPieces = 96;
struct PackArgs {
  void* dst = nullptr;
  DType dst_dtype = DType::F32;
  DType src_dtype = DType::F32;
  const PackPiece* pieces = nullptr;
  int count = 0;
  double scale = 1.0;
  bool accumulate = false;
};
int pack(const PackArgs& args, CUstream_st* stream);
void pack_cpu(const PackArgs& args);

inline constexpr size_t kMaxNumbersBytes = 128;

/// Decoupled weight decay Adam (Loshchilov & Hutter, arXiv 1711.05101) as PyTorch's AdamW computes it, one pass:
///   p -= lr·wd·p;  m = β1·m + (1−β1)·g;  v = β2·v + (1−β2)·g²;  p -= lr/bc1 · m / (sqrt(v)/sqrt(bc2) + eps),  bc_k = 1
///   − β_k^step.
/// g = grad · grad_scale (negative: maximises). With `cast`, the new p is written there too, in cast_dtype. Moments are fp32 (fp64 if param_dtype is F64). With `max_exp_avg_sq`
/// (AMSGrad) that becomes max(max_exp_avg_sq, v) and takes v's place in the last line.
struct AdamWArgs {
  void* param = nullptr;
  DType param_dtype = DType::F32;
  const void* grad = nullptr;
  DType grad_dtype = DType::F32;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;
  void* cast = nullptr;             ///< null: none; for F32 and F64 parameters only
  DType cast_dtype = DType::BF16;  ///< F32, F16 or BF16
  int64_t numel = 0;
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  int64_t step = 1;  ///< counted from 1
  double grad_scale = 1.0;
  const void* numbers = nullptr;  ///< device memory to read what follows from lr … grad_scale from (a captured launch); null: work it out
};
int adamw(const AdamWArgs& args, CUstream_st* stream);
/// What `numbers` points to, written to host memory: at most kMaxNumbersBytes.
void adamw_numbers(const AdamWArgs& args, void* out);
void adamw_cpu(const AdamWArgs& args);

/// Stochastic gradient descent as PyTorch's SGD computes it, one pass:
///   g = grad · grad_scale + wd·p;  b = first ? g : momentum·b + (1−dampening)·g;
///   p -= lr · (nesterov ? g + momentum·b : b).
/// Without `momentum_buffer` (fp32; fp64 if param_dtype is F64): p -= lr · g. Negative grad_scale: maximises.
struct SGDArgs {
  void* param = nullptr;
  DType param_dtype = DType::F32;
  const void* grad = nullptr;
  DType grad_dtype = DType::F32;
  void* momentum_buffer = nullptr;
  int64_t numel = 0;
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  bool first = false;  ///< the buffer holds nothing yet; it is not read
  double grad_scale = 1.0;
  const void* numbers = nullptr;  ///< as AdamWArgs::numbers
};
int sgd(const SGDArgs& args, CUstream_st* stream);
void sgd_numbers(const SGDArgs& args, void* out);
void sgd_cpu(const SGDArgs& args);

/// Norm accumulation over a flat range. `result` is one double (device memory on CUDA): for p = ∞ it becomes
/// max(result, max|x|), else result += Σ|x|^p. A NaN or infinity in x reaches the result. `scratch` holds
/// norm_scratch_bytes() bytes of device memory; its content need not be initialised, but it must not be shared by
/// concurrent streams. Deterministic: the same input gives the same bits.
struct NormArgs {
  const void* src = nullptr;
  DType src_dtype = DType::F32;
  int64_t numel = 0;
  double p = 2.0;
  double* result = nullptr;
  void* scratch = nullptr;
};
[[nodiscard]] size_t norm_scratch_bytes();
int norm_accumulate(const NormArgs& args, CUstream_st* stream);
void norm_accumulate_cpu(const NormArgs& args);

/// x[i] *= *coefficient (one double in device memory; on the CPU twin host memory), in fp32 (fp64 for F64). NaN and
/// infinity times 0 become NaN. A coefficient of 1 touches nothing.
int scale_by(void* data, DType dtype, int64_t numel, const double* coefficient, CUstream_st* stream);
void scale_by_cpu(void* data, DType dtype, int64_t numel, const double* coefficient);

}  // namespace fsdpp::kernels

#pragma once
#include "kernels/dtype.h"

/// The gradient of an embedding table, without sorting and without atomic additions. As in kernels.h, the CUDA launcher
/// queues on `stream` and returns a cudaError_t as int; it has a CPU twin, which gives the same bits in every run as
/// the launcher does.
namespace fsdpp::kernels {

/// Tokens of one row are summed in runs of this many, in token order, and then the runs in theirs: up to so many, it is
/// the plain order of tokens.
inline constexpr int64_t kEmbeddingRun = 32;

///   out[r] = Σ over tokens t with ids[t] = r of grad[t]  (+= with `accumulate`)
/// Sums are in compute_type(dtype), and rounded to out_dtype once. All rows are written, with `accumulate` those that
/// have tokens. Tokens whose id is padding_idx, or is outside [0, vocab), take no part. Arrays are dense, of any
/// alignment (16-byte accesses where they and `dim` allow). Two launches.
struct EmbeddingBackwardArgs {
  const void* grad = nullptr;  ///< [tokens, dim] of `dtype`
  DType dtype = DType::F32;
  const int64_t* ids = nullptr;  ///< [tokens]
  void* out = nullptr;           ///< [vocab, dim] of `out_dtype`
  DType out_dtype = DType::F32;
  bool accumulate = false;
  void* scratch =
      nullptr;         ///< embedding_backward_scratch_bytes() of device memory, at a multiple of 8; the CPU needs none
  int64_t tokens = 0;  ///< below 2^31, as vocab and dim (CUDA; cudaErrorInvalidValue else)
  int64_t vocab = 0;
  int64_t dim = 0;
  int64_t padding_idx = -1;  ///< -1: none
};
[[nodiscard]] size_t embedding_backward_scratch_bytes(int64_t tokens, int64_t vocab);
int embedding_backward(const EmbeddingBackwardArgs& args, CUstream_st* stream);
void embedding_backward_cpu(const EmbeddingBackwardArgs& args);

}  // namespace fsdpp::kernels

#pragma once
#include "kernels/dtype.h"

/// Cross entropy of rows of logits, and its gradient in their place. Arithmetic is in compute_type(dtype) whatever the
/// dtype of the logits. As in kernels.h, CUDA launchers queue on `stream` and return a cudaError_t as int; each has a
/// CPU twin. Same input, same bits.
namespace fsdpp::kernels {

///   lse = log Σ_j exp(logits[r, j]);  losses[r] = lse − logits[r, targets[r]]
///   with write_gradient: logits[r, j] = (exp(logits[r, j] − lse) − [j = targets[r]]) · *factor
/// A row whose target is ignore_index has loss and gradient 0; one whose target is outside [0, vocab) has NaN for both.
struct CrossEntropyArgs {
  void* logits = nullptr;  ///< dense [rows, vocab]
  DType dtype = DType::F32;
  const int64_t* targets = nullptr;
  void* losses = nullptr;  ///< [rows] of compute_type(dtype)
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t ignore_index = -100;
  bool write_gradient = false;
  const double* factor = nullptr;  ///< null: 1
};
int cross_entropy(const CrossEntropyArgs& args, CUstream_st* stream);
void cross_entropy_cpu(const CrossEntropyArgs& args);

/// factors[0] = 1 / n, n being how many targets are not ignore_index; and 1 / max(n, 1) = factors[1] · factors[2], the
/// largest power of two not above it, by which numbers are scaled exactly, and the rest: 1 if n is a power of two.
struct MeanFactorsArgs {
  const int64_t* targets = nullptr;
  int64_t rows = 0;
  int64_t ignore_index = -100;
  double* factors = nullptr;  ///< three
};
int mean_factors(const MeanFactorsArgs& args, CUstream_st* stream);
void mean_factors_cpu(const MeanFactorsArgs& args);

}  // namespace fsdpp::kernels

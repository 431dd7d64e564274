#pragma once
#include "kernels/dtype.h"

/// The sums of a matrix's columns: the gradient of a bias. As in kernels.h, the CUDA launcher queues on `stream` and
/// returns a cudaError_t as int; it has a CPU twin. Same input, same bits.
namespace fsdpp::kernels {

///   out[c] = Σ over rows of x[r, c]  (+= with `accumulate`)
/// x is dense, of any alignment (16-byte loads where it and `columns` allow). Sums are in compute_type(dtype), on the
/// CPU in double, and rounded to out_dtype once. Of no rows they are zero. Two launches.
struct ColumnSumsArgs {
  const void* x = nullptr;  ///< [rows, columns] of `dtype`
  DType dtype = DType::F32;
  void* out = nullptr;  ///< [columns] of `out_dtype`
  DType out_dtype = DType::F32;
  bool accumulate = false;
  void* scratch = nullptr;  ///< column_sums_scratch_bytes() of device memory, at a multiple of 16; the CPU needs none
  int64_t rows = 0;
  int64_t columns = 0;
};
[[nodiscard]] size_t column_sums_scratch_bytes(int64_t rows, int64_t columns, DType dtype);
int column_sums(const ColumnSumsArgs& args, CUstream_st* stream);
void column_sums_cpu(const ColumnSumsArgs& args);

}  // namespace fsdpp::kernels

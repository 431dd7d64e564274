#pragma once
#include "kernels/cuda/vector.cuh"

/// The end of a sum over rows that many blocks have begun.
namespace fsdpp::kernels {

inline constexpr int kFinalColumns = 32;  // of a block, and the parts in which it sums the rows
inline constexpr int kFinalParts = 32;

/// out[c] = Σ over rows of partials[r, c]; what was there is added in the wider of the two types.
template <class C, class Out>
__global__ void __launch_bounds__(kFinalColumns* kFinalParts)
    final_column_sums_kernel(Out* out, const C* partials, int64_t rows, int64_t columns, bool accumulate) {
  using Wide = typename ComputeType<C, Out>::type;
  __shared__ C parts[kFinalParts][kFinalColumns];
  const int column = static_cast<int>(threadIdx.x) % kFinalColumns;
  const int part = static_cast<int>(threadIdx.x) / kFinalColumns;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kFinalColumns + column;
  C sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (int64_t r = part; r < rows; r += kFinalParts) sum += partials[r * columns + c];
  }
  parts[part][column] = sum;
  __syncthreads();
  if (part != 0 || c >= columns) return;
  for (int k = 1; k < kFinalParts; ++k) sum += parts[k][column];
  Wide total = static_cast<Wide>(sum);
  if (accumulate) total += to_compute<Wide>(out[c]);
  from_compute(total, out[c]);
}

/// Queues it. Returns a cudaError_t.
template <class C>
int final_column_sums(void* out, DType out_dtype, const C* partials, int64_t rows, int64_t columns, bool accumulate,
                      cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((columns + kFinalColumns - 1) / kFinalColumns);
  return with_type(out_dtype, [&](auto type) {
    final_column_sums_kernel<<<blocks, kFinalColumns * kFinalParts, 0, stream>>>(static_cast<decltype(type)*>(out),
                                                                                 partials, rows, columns, accumulate);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace fsdpp::kernels

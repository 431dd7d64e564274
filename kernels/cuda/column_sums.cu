#include "kernels/cuda/column_sums.cuh"

#include "kernels/column_sums.h"

namespace fsdpp::kernels {
namespace {

constexpr int kColumnLoads = 8;            // rows that a thread has under way
constexpr int64_t kStripBlocks = 8 * 132;  // constant, so that the order of the additions does not depend on the device
constexpr int kMostLanes = 32;

/// A block sums strip_rows rows of lanes vectors; its threads are lanes × parts of those rows.
struct ColumnPlan {
  int lanes = 1;
  int64_t column_blocks = 0;
  int64_t strip_rows = 0;
  int64_t strips = 0;
};

int64_t divided_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

ColumnPlan column_plan(int64_t rows, int64_t vectors) {
  ColumnPlan plan;
  while (plan.lanes < kMostLanes && plan.lanes < vectors) plan.lanes *= 2;
  plan.column_blocks = divided_up(vectors, plan.lanes);
  const int64_t turn = int64_t{kThreads} / plan.lanes * kColumnLoads;
  const int64_t most = kStripBlocks > plan.column_blocks ? kStripBlocks / plan.column_blocks : 1;
  plan.strip_rows = divided_up(divided_up(rows, turn), most) * turn;
  plan.strips = rows > 0 ? divided_up(rows, plan.strip_rows) : 0;
  return plan;
}

/// The sums of rows first, first + stride, … below end; x is at the thread's columns.
template <int N, class C, class T>
__device__ Vec<C, N> strip_sums(const T* x, int64_t columns, int64_t first, int64_t stride, int64_t end) {
  Vec<C, N> sums = {};
  for (int64_t row = first; row < end; row += kColumnLoads * stride) {
    Packed<T, N> in[kColumnLoads] = {};
#pragma unroll
    for (int s = 0; s < kColumnLoads; ++s) {
      const int64_t r = row + s * stride;
      if (r < end) in[s] = load_packed<N, StreamingAccess>(x + r * columns);
    }
#pragma unroll
    for (int s = 0; s < kColumnLoads; ++s) {
      const Vec<T, N> values = unpack<N>(opaque<N>(in[s]));
#pragma unroll
      for (int j = 0; j < N; ++j) sums.v[j] += to_compute<C>(values.v[j]);
    }
  }
  return sums;
}

/// The first `lanes` threads get the sums over all that are a multiple of `lanes` further on.
template <int N, class C>
__device__ void combine_strip(Vec<C, N>& sums, int lanes) {
  __shared__ C shared[N][kThreads];
  const int t = static_cast<int>(threadIdx.x);
  for (int half = kThreads / 2; half >= lanes; half /= 2) {
    if (t >= half && t < 2 * half) {
#pragma unroll
      for (int j = 0; j < N; ++j) shared[j][t] = sums.v[j];
    }
    __syncthreads();
    if (t < half) {
#pragma unroll
      for (int j = 0; j < N; ++j) sums.v[j] += shared[j][t + half];
    }
  }
}

/// partials[strip, c] = the sum of the strip's x[r, c].
template <int N, class C, class T>
__global__ void __launch_bounds__(kThreads, 4)
    column_strips_kernel(const T* x, C* partials, int64_t rows, int64_t columns, ColumnPlan plan) {
  const int lane = static_cast<int>(threadIdx.x) % plan.lanes, part = static_cast<int>(threadIdx.x) / plan.lanes;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * plan.lanes + lane) * N;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * plan.strip_rows;
  const int64_t end = begin + plan.strip_rows < rows ? begin + plan.strip_rows : rows;
  Vec<C, N> sums = {};
  if (column < columns) sums = strip_sums<N, C>(x + column, columns, begin + part, kThreads / plan.lanes, end);
  combine_strip(sums, plan.lanes);
  if (part == 0 && column < columns) store_vec<N>(partials + static_cast<int64_t>(blockIdx.y) * columns + column, sums);
}

template <int N, class T>
int launch_column_sums(const ColumnSumsArgs& a, const T* x, cudaStream_t stream) {
  using C = typename ComputeType<T>::type;
  auto* const partials = static_cast<C*>(a.scratch);
  const ColumnPlan plan = column_plan(a.rows, a.columns / N);
  if (plan.strips > 0) {
    const dim3 grid(static_cast<unsigned>(plan.column_blocks), static_cast<unsigned>(plan.strips));
    column_strips_kernel<N><<<grid, kThreads, 0, stream>>>(x, partials, a.rows, a.columns, plan);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return static_cast<int>(error);
  }
  return final_column_sums(a.out, a.out_dtype, partials, plan.strips, a.columns, a.accumulate, stream);
}

}  // namespace

size_t column_sums_scratch_bytes(int64_t rows, int64_t columns, DType dtype) {
  const int64_t vector = 16 / static_cast<int64_t>(size_of(dtype));
  const int64_t strips[] = {column_plan(rows, columns).strips, column_plan(rows, divided_up(columns, vector)).strips};
  return static_cast<size_t>((strips[0] > strips[1] ? strips[0] : strips[1]) * columns) * size_of(compute_type(dtype));
}

int column_sums(const ColumnSumsArgs& a, CUstream_st* stream) {
  if (a.columns <= 0) return 0;
  return with_type(a.dtype, [&](auto type) {
    constexpr int kVec = vec_length<decltype(type)>();
    const auto* const x = static_cast<const decltype(type)*>(a.x);
    if (a.columns % kVec == 0 && is_vec_aligned<kVec>(x)) return launch_column_sums<kVec>(a, x, stream);
    return launch_column_sums<1>(a, x, stream);
  });
}

}  // namespace fsdpp::kernels

#include "kernels/rms_norm.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/rows.cuh"

namespace fsdpp::kernels {
namespace {

// Blocks that a Hopper GPU holds at once. Constants, so that the order of the additions does not depend on the device.
constexpr unsigned kForwardBlocks = 3 * 132;
constexpr unsigned kBackwardBlocks = 2 * 132;

template <class T>
using Compute = typename ComputeType<T>::type;

/// Rows of the next turn are loaded before this turn's are used, where registers allow.
template <int N, int K>
constexpr bool kAhead = K == 1 && N > 1;
/// The weight stays in registers if it is short there; otherwise in the first-level cache.
template <int N, int K>
constexpr bool kHoldWeight = N > 1 && K <= 2;

template <class T, int N, int K>
struct Weight {
  RowPart<T, N, K> held;
  const T* data;
  int dim;
  __device__ Weight(const RowGroup& group, const T* weight, int width) : held{}, data(weight), dim(width) {
    if constexpr (kHoldWeight<N, K>) held = load_row<N, K, CachedAccess>(group, weight, width);
  }
  __device__ Vec<T, N> part(const RowGroup& group, int k) const {
    if constexpr (kHoldWeight<N, K>) return unpack<N>(opaque<N>(held.v[k]));
    const int i = row_index<N>(group, k);
    return i < dim ? load_vec<N>(data + i) : Vec<T, N>{};
  }
};

template <class T>
struct Forward {
  const T* x;
  const T* residual;
  const T* weight;
  T* sum;
  T* normed;
  Compute<T>* rstd;
  int64_t rows;
  int dim, group_threads;
  Compute<T> eps;
};

template <class T, int N, int K>
struct ForwardRow {
  RowPart<T, N, K> x, residual;
  __device__ void load(const RowGroup& group, const Forward<T>& a, int64_t row) {
    x = load_row<N, K, StreamingAccess>(group, a.x + row * a.dim, a.dim);
    if (a.residual != nullptr) residual = load_row<N, K, StreamingAccess>(group, a.residual + row * a.dim, a.dim);
  }
};

/// x becomes the sum as it reads back from memory; returns this thread's part of Σ x².
template <class T, int N, int K>
__device__ Compute<T> add_and_square(ForwardRow<T, N, K>& row, bool add) {
  using C = Compute<T>;
  C squares = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Vec<T, N> x = unpack<N>(row.x.v[k]);
    const Vec<T, N> residual = unpack<N>(row.residual.v[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (add) from_compute(to_compute<C>(x.v[j]) + to_compute<C>(residual.v[j]), x.v[j]);
      const C value = to_compute<C>(x.v[j]);
      squares = fma(value, value, squares);
    }
    row.x.v[k] = packed<N>(x);
  }
  return squares;
}

template <class T, int N, int K>
__device__ void normalise(const RowGroup& group, const Weight<T, N, K>& weight, Compute<T> rstd, RowPart<T, N, K>& x) {
  using C = Compute<T>;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Vec<T, N> w = weight.part(group, k);
    Vec<T, N> values = unpack<N>(opaque<N>(x.v[k]));
#pragma unroll
    for (int j = 0; j < N; ++j) from_compute(to_compute<C>(values.v[j]) * rstd * to_compute<C>(w.v[j]), values.v[j]);
    x.v[k] = packed<N>(values);
  }
}

template <class T, int N, int K>
__global__ void __launch_bounds__(kRowThreads, kAhead<N, K> ? 3 : 1) forward_kernel(Forward<T> a) {
  using C = Compute<T>;
  const RowGroup group(a.group_threads);
  const int groups = static_cast<int>(blockDim.x) / group.threads;
  const Weight<T, N, K> weight(group, a.weight, a.dim);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  int64_t r = static_cast<int64_t>(blockIdx.x) * groups + group.id;
  ForwardRow<T, N, K> next = {};
  if (kAhead<N, K> && r < a.rows) next.load(group, a, r);
  for (int parity = 0; r < a.rows; r += stride, parity ^= 1) {
    ForwardRow<T, N, K> row = next;
    if constexpr (!kAhead<N, K>) row.load(group, a, r);
    if (kAhead<N, K> && r + stride < a.rows) next.load(group, a, r + stride);
    const C squares = combine_group(group, add_and_square(row, a.residual != nullptr), parity, AddOp());
    const C rstd = rsqrt(squares / static_cast<C>(a.dim) + a.eps);
    if (a.residual != nullptr) store_row<StreamingAccess>(group, a.sum + r * a.dim, a.dim, row.x);
    normalise(group, weight, rstd, row.x);
    store_row<CachedAccess>(group, a.normed + r * a.dim, a.dim, row.x);
    if (a.rstd != nullptr && group.lane == 0) a.rstd[r] = rstd;
  }
}

template <class T>
struct Backward {
  const T* grad_normed;
  const T* grad_sum;
  const T* sum;
  const T* weight;
  const Compute<T>* rstd;
  T* grad_x;
  Compute<T>* partials;  ///< [blocks, dim]
  int64_t rows;
  int dim, group_threads;
};

template <class T, int N, int K>
struct BackwardRow {
  RowPart<T, N, K> grad, sum, grad_sum;
  Compute<T> rstd;
  __device__ void load(const RowGroup& group, const Backward<T>& a, int64_t row) {
    grad = load_row<N, K, StreamingAccess>(group, a.grad_normed + row * a.dim, a.dim);
    sum = load_row<N, K, StreamingAccess>(group, a.sum + row * a.dim, a.dim);
    if (a.grad_sum != nullptr) grad_sum = load_row<N, K, StreamingAccess>(group, a.grad_sum + row * a.dim, a.dim);
    rstd = a.rstd[row];
  }
};

template <class C, int N, int K>
struct WeightSums {
  C v[K][N] = {};
};

/// Adds to the weight's gradient; returns this thread's part of Σ grad · weight · sum.
template <class T, int N, int K>
__device__ Compute<T> first_pass(const RowGroup& group, const BackwardRow<T, N, K>& row, const Weight<T, N, K>& weight,
                                 WeightSums<Compute<T>, N, K>& sums) {
  using C = Compute<T>;
  C dot = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Vec<T, N> w = weight.part(group, k), grad = unpack<N>(row.grad.v[k]), sum = unpack<N>(row.sum.v[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C product = to_compute<C>(grad.v[j]) * to_compute<C>(sum.v[j]);
      dot = fma(product, to_compute<C>(w.v[j]), dot);
      sums.v[k][j] = fma(product, row.rstd, sums.v[k][j]);
    }
  }
  return dot;
}

/// row.grad becomes the gradient of the row; `factor` is rstd³ · mean(grad · weight · sum).
template <class T, int N, int K>
__device__ void second_pass(const RowGroup& group, BackwardRow<T, N, K>& row, const Weight<T, N, K>& weight,
                            Compute<T> factor, bool add) {
  using C = Compute<T>;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Vec<T, N> w = weight.part(group, k), sum = unpack<N>(opaque<N>(row.sum.v[k])),
                    other = unpack<N>(row.grad_sum.v[k]);
    Vec<T, N> grad = unpack<N>(opaque<N>(row.grad.v[k]));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C value = to_compute<C>(grad.v[j]) * to_compute<C>(w.v[j]) * row.rstd;
      value = fma(to_compute<C>(sum.v[j]), -factor, value);
      if (add) value += to_compute<C>(other.v[j]);
      from_compute(value, grad.v[j]);
    }
    row.grad.v[k] = packed<N>(grad);
  }
}

/// The groups' sums added up in their order, and written as the block's row of the partial sums.
template <class C, int N, int K>
__device__ void write_partials(const RowGroup& group, int groups, WeightSums<C, N, K>& sums, C* out, int dim) {
  extern __shared__ __align__(16) unsigned char bytes[];
  C* const shared = reinterpret_cast<C*>(bytes);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    for (int turn = 1; turn < groups; ++turn) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (group.id == turn) shared[j * group.threads + group.lane] = sums.v[k][j];
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (group.id == 0) sums.v[k][j] += shared[j * group.threads + group.lane];
      }
    }
  }
  if (group.id != 0) return;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = row_index<N>(group, k);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (i < dim) out[i + j] = sums.v[k][j];
    }
  }
}

template <class T, int N, int K>
__global__ void __launch_bounds__(kRowThreads, kAhead<N, K> ? 2 : 1) backward_kernel(Backward<T> a) {
  using C = Compute<T>;
  const RowGroup group(a.group_threads);
  const int groups = static_cast<int>(blockDim.x) / group.threads;
  const Weight<T, N, K> weight(group, a.weight, a.dim);
  WeightSums<C, N, K> sums;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  int64_t r = static_cast<int64_t>(blockIdx.x) * groups + group.id;
  BackwardRow<T, N, K> next = {};
  if (kAhead<N, K> && r < a.rows) next.load(group, a, r);
  for (int parity = 0; r < a.rows; r += stride, parity ^= 1) {
    BackwardRow<T, N, K> row = next;
    if constexpr (!kAhead<N, K>) row.load(group, a, r);
    if (kAhead<N, K> && r + stride < a.rows) next.load(group, a, r + stride);
    const C dot = combine_group(group, first_pass(group, row, weight, sums), parity, AddOp());
    if (a.grad_x == nullptr) continue;
    const C factor = dot / static_cast<C>(a.dim) * row.rstd * row.rstd * row.rstd;
    second_pass(group, row, weight, factor, a.grad_sum != nullptr);
    store_row<CachedAccess>(group, a.grad_x + r * a.dim, a.dim, row.grad);
  }
  if (a.partials != nullptr)
    write_partials(group, groups, sums, a.partials + static_cast<int64_t>(blockIdx.x) * a.dim, a.dim);
}

template <class T>
Forward<T> typed(const RmsNormArgs& a, const RowPlan& plan) {
  using C = Compute<T>;
  return {static_cast<const T*>(a.x),
          static_cast<const T*>(a.residual),
          static_cast<const T*>(a.weight),
          static_cast<T*>(a.sum),
          static_cast<T*>(a.normed),
          static_cast<C*>(a.rstd),
          a.rows,
          static_cast<int>(a.dim),
          plan.group_threads,
          static_cast<C>(a.eps)};
}

template <class T>
Backward<T> typed(const RmsNormBackwardArgs& a, const RowPlan& plan) {
  using C = Compute<T>;
  return {static_cast<const T*>(a.grad_normed),
          static_cast<const T*>(a.grad_sum),
          static_cast<const T*>(a.sum),
          static_cast<const T*>(a.weight),
          static_cast<const C*>(a.rstd),
          static_cast<T*>(a.grad_x),
          static_cast<C*>(a.grad_weight != nullptr ? a.scratch : nullptr),
          a.rows,
          static_cast<int>(a.dim),
          plan.group_threads};
}

template <class T, int N, int K>
int launch(const RmsNormArgs& a, cudaStream_t stream) {
  const RowPlan plan = row_plan(a.rows, a.dim / N, K, kForwardBlocks);
  forward_kernel<T, N, K><<<plan.blocks, plan.group_threads * plan.groups, 0, stream>>>(typed<T>(a, plan));
  return static_cast<int>(cudaGetLastError());
}

template <class T, int N, int K>
int launch(const RmsNormBackwardArgs& a, cudaStream_t stream) {
  using C = Compute<T>;
  const RowPlan plan = row_plan(a.rows, a.dim / N, K, kBackwardBlocks);
  const size_t shared = plan.groups > 1 ? sizeof(C) * N * static_cast<size_t>(plan.group_threads) : 0;
  if (plan.blocks > 0)
    backward_kernel<T, N, K><<<plan.blocks, plan.group_threads * plan.groups, shared, stream>>>(typed<T>(a, plan));
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess || a.grad_weight == nullptr)
    return static_cast<int>(error);
  return final_column_sums(a.grad_weight, a.grad_weight_dtype, static_cast<const C*>(a.scratch), plan.blocks, a.dim,
                           a.accumulate, stream);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class T, int N, int K, int... Wider, class Args>
int launch_by_width(const Args& a, cudaStream_t stream) {
  if constexpr (sizeof...(Wider) > 0) {
    if (a.dim > static_cast<int64_t>(N) * K * kRowThreads) return launch_by_width<T, N, Wider...>(a, stream);
  }
  return launch<T, N, K>(a, stream);
}

/// Vectors where every row of every array is aligned.
template <class T, class Args, class... Arrays>
int dispatch(const Args& a, cudaStream_t stream, const Arrays*... arrays) {
  constexpr int kVec = vec_length<T>();
  if (a.dim > kMaxRmsNormWidth) return static_cast<int>(cudaErrorInvalidValue);
  if constexpr (sizeof(T) < 8) {
    if (a.dim % kVec == 0 && (... && aligned(arrays))) {
      if constexpr (sizeof(T) == 2)
        return launch_by_width<T, kVec, 1, 2, 4>(a, stream);
      else
        return launch_by_width<T, kVec, 1, 2, 4, 8>(a, stream);
    }
  }
  return launch_by_width<T, 1, 8, 32>(a, stream);
}

}  // namespace

int rms_norm(const RmsNormArgs& a, CUstream_st* stream) {
  if (a.rows <= 0 || a.dim <= 0) return 0;
  return with_type(
      a.dtype, [&](auto t) { return dispatch<decltype(t)>(a, stream, a.x, a.residual, a.weight, a.sum, a.normed); });
}

size_t rms_norm_scratch_bytes(int64_t rows, int64_t dim, DType dtype) {
  constexpr int64_t kMost = kBackwardBlocks;
  return static_cast<size_t>((rows < kMost ? rows : kMost) * dim) * size_of(compute_type(dtype));
}

int rms_norm_backward(const RmsNormBackwardArgs& a, CUstream_st* stream) {
  if (a.dim <= 0) return 0;
  return with_type(a.dtype, [&](auto t) {
    return dispatch<decltype(t)>(a, stream, a.grad_normed, a.grad_sum, a.sum, a.weight, a.grad_x);
  });
}

}  // namespace fsdpp::kernels

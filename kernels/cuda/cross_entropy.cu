#include "kernels/cross_entropy.h"

#include "kernels/cuda/exponential.cuh"
#include "kernels/cuda/rows.cuh"

namespace fsdpp::kernels {
namespace {

constexpr int kHeld =
    8;  // vectors that a thread keeps between the passes; wider rows are read again, from the second-level cache
constexpr unsigned kMostBlocks = 16 * 132;

/// exp(x − max) summed, with the max so far.
template <class T>
struct LogSum {
  using C = typename ComputeType<T>::type;
  using P = Precision<T>;
  C max = -INFINITY;
  C sum = 0;
  /// Subtracted from exponents: not the max where that would make NaN of nothing but -infinity.
  __device__ static C shift(C max) { return max == C(-INFINITY) ? C(0) : max; }
  __device__ void rescale(C new_max) {
    sum *= P::exp(max - shift(new_max));
    max = new_max;
  }
  template <int N>
  __device__ void add(const Vec<T, N>& x) {
    C new_max = max;
#pragma unroll
    for (int j = 0; j < N; ++j) new_max = MaxOp()(new_max, to_compute<C>(x.v[j]));
    rescale(new_max);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += P::exp(to_compute<C>(x.v[j]) - shift(max));
  }
};

/// A row as a block sees it: vectors from its first aligned value on, and fewer than 2·N single values at its ends.
template <class T, int N>
struct RowView {
  T* data;
  int head;
  int vectors;
  int edge;  ///< this thread's single value, or -1
  __device__ RowView(T* row, int64_t vocab) : data(row) {
    const int64_t to_aligned = values_to_alignment<N>(row);
    head = static_cast<int>(to_aligned < vocab ? to_aligned : vocab);
    vectors = (static_cast<int>(vocab) - head) / N;
    const int t = static_cast<int>(threadIdx.x);
    edge = t >= vocab - static_cast<int64_t>(vectors) * N ? -1 : t < head ? t : t + vectors * N;
  }
  __device__ int first(int k) const { return head + k * N; }
};

template <class T, int N>
__device__ void write_gradient(T* row, int first, Vec<T, N> x, typename ComputeType<T>::type lse, int target,
                               typename ComputeType<T>::type factor) {
  using C = typename ComputeType<T>::type;
  const int hit = target - first;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    C p = Precision<T>::exp(to_compute<C>(x.v[j]) - lse);
    if (j == hit) p -= C(1);
    from_compute(p * factor, x.v[j]);
  }
  store_vec<N>(row + first, x);
}

template <class T, int N>
struct Held {
  Packed<T, N> v[kHeld];
  /// Loads the first vectors of this thread, then calls use(first value, vector) for all of them.
  template <class Use>
  __device__ void load_and_use(const RowView<T, N>& row, Use use) {
    const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (t + k * threads < row.vectors) v[k] = load_packed<N>(row.data + row.first(t + k * threads));
    use_again(row, use);
  }
  template <class Use>
  __device__ void use_again(const RowView<T, N>& row, Use use) {
    const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (t + k * threads < row.vectors) use(row.first(t + k * threads), unpack<N>(opaque<N>(v[k])));
    for (int k = t + kHeld * threads; k < row.vectors; k += threads)
      use(row.first(k), load_vec<N>(row.data + row.first(k)));
  }
};

template <class T, int N>
__device__ void fill_row(const RowView<T, N>& row, T value) {
  Vec<T, N> x;
#pragma unroll
  for (int j = 0; j < N; ++j) x.v[j] = value;
  for (int k = static_cast<int>(threadIdx.x); k < row.vectors; k += static_cast<int>(blockDim.x))
    store_vec<N>(row.data + row.first(k), x);
  if (row.edge >= 0) row.data[row.edge] = value;
}

/// Returns the row's loss to all threads. `target` is inside the row.
template <class T, int N>
__device__ typename ComputeType<T>::type row_loss(const RowView<T, N>& row, int target, bool gradient,
                                                  const double* factor_or_null) {
  using C = typename ComputeType<T>::type;
  const RowGroup block(static_cast<int>(blockDim.x));
  const C at_target = to_compute<C>(row.data[target]);
  Held<T, N> held;
  LogSum<T> part;
  held.load_and_use(row, [&](int, const Vec<T, N>& x) { part.add(x); });
  Vec<T, 1> edge{};
  if (row.edge >= 0) {
    edge.v[0] = row.data[row.edge];
    part.add(edge);
  }
  const C max = combine_group(block, part.max, 0, MaxOp());
  part.rescale(max);
  const C lse = max + log(combine_group(block, part.sum, 1, AddOp()));
  if (gradient) {
    const C factor = factor_or_null ? static_cast<C>(*factor_or_null) : C(1);
    held.use_again(row,
                   [&](int first, const Vec<T, N>& x) { write_gradient(row.data, first, x, lse, target, factor); });
    if (row.edge >= 0) write_gradient(row.data, row.edge, edge, lse, target, factor);
  }
  return lse - at_target;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    cross_entropy_kernel(T* logits, const int64_t* targets, typename ComputeType<T>::type* losses, int64_t rows,
                         int64_t vocab, int64_t ignore_index, bool gradient, const double* factor) {
  using C = typename ComputeType<T>::type;
  constexpr int kVec = vec_length<T>();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const RowView<T, kVec> row(logits + r * vocab, vocab);
    const int64_t target = targets[r];
    C loss = target == ignore_index ? C(0) : C(NAN);
    if (target != ignore_index && target >= 0 && target < vocab) {
      loss = row_loss(row, static_cast<int>(target), gradient, factor);
    } else if (gradient) {
      T value;
      from_compute(loss, value);
      fill_row(row, value);
    }
    if (threadIdx.x == 0) losses[r] = loss;
  }
}

__global__ void __launch_bounds__(kRowThreads)
    mean_factors_kernel(const int64_t* targets, int64_t rows, int64_t ignore_index, double* factors) {
  int64_t count = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kRowThreads) count += targets[r] != ignore_index ? 1 : 0;
  count = combine_group(RowGroup(kRowThreads), count, 0, AddOp());
  if (threadIdx.x != 0) return;
  factors[0] = 1.0 / static_cast<double>(count);
  int64_t power = 1;
  while (power < count) power *= 2;
  factors[1] = 1.0 / static_cast<double>(power);
  factors[2] = static_cast<double>(power) / static_cast<double>(count > 1 ? count : 1);
}

/// At least two warps, so that a barrier lies between the reads and the writes of a row.
int threads_for(int64_t vocab, int values) {
  const int64_t vectors = (vocab + values - 1) / values;
  const int64_t threads = ((vectors + kHeld - 1) / kHeld + kWarp - 1) / kWarp * kWarp;
  return static_cast<int>(threads < 2 * kWarp ? 2 * kWarp : threads > kRowThreads ? kRowThreads : threads);
}

}  // namespace

int cross_entropy(const CrossEntropyArgs& a, CUstream_st* stream) {
  if (a.rows <= 0 || a.vocab <= 0) return 0;
  if (a.vocab > INT32_MAX) return static_cast<int>(cudaErrorInvalidValue);
  const auto blocks =
      static_cast<unsigned>(a.rows < static_cast<int64_t>(kMostBlocks) ? a.rows : static_cast<int64_t>(kMostBlocks));
  return with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    using C = typename ComputeType<T>::type;
    cross_entropy_kernel<T><<<blocks, threads_for(a.vocab, vec_length<T>()), 0, stream>>>(
        static_cast<T*>(a.logits), a.targets, static_cast<C*>(a.losses), a.rows, a.vocab, a.ignore_index,
        a.write_gradient, a.factor);
    return static_cast<int>(cudaGetLastError());
  });
}

int mean_factors(const MeanFactorsArgs& a, CUstream_st* stream) {
  mean_factors_kernel<<<1, kRowThreads, 0, stream>>>(a.targets, a.rows, a.ignore_index, a.factors);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fsdpp::kernels

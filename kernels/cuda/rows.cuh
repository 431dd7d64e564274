#pragma once
#include "kernels/cuda/vector.cuh"

/// Rows that stay in registers between two passes over them: a group of whole warps shares a row, each thread holds K
/// vectors of N values.
namespace fsdpp::kernels {

inline constexpr int kRowThreads = 512;  // of a block at most; it holds as many groups as fit
inline constexpr int kWarp = 32;

/// How a kernel over rows is launched.
struct RowPlan {
  int group_threads = kWarp;
  int groups = 1;
  unsigned blocks = 0;
};
/// `vectors` in a row, K held by each thread; at most `most_blocks` blocks, which take rows in turn.
inline RowPlan row_plan(int64_t rows, int64_t vectors, int k, unsigned most_blocks) {
  RowPlan plan;
  const int64_t threads = (vectors + k - 1) / k;
  plan.group_threads = static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
  plan.groups = kRowThreads / plan.group_threads;
  const int64_t blocks = (rows + plan.groups - 1) / plan.groups;
  plan.blocks = static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks);
  return plan;
}

struct RowGroup {
  int id;       ///< in the block
  int lane;     ///< of the thread in the group
  int threads;  ///< in the group
  __device__ explicit RowGroup(int group_threads)
      : id(static_cast<int>(threadIdx.x) / group_threads),
        lane(static_cast<int>(threadIdx.x) % group_threads),
        threads(group_threads) {}
  /// Waits for the group's threads. Barrier 0 is the whole block's; a group of several warps has an id below 8.
  __device__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(id + 1), "r"(threads) : "memory"); }
};

struct AddOp {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};
/// The larger one; NaN if either is.
struct MaxOp {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return b > a || b != b ? b : a;
  }
};

/// The group's values combined, in an order that never changes; all threads get the result. Successive calls must
/// alternate `parity`.
template <class Op, class C>
__device__ C combine_group(const RowGroup& group, C value, int parity, Op op) {
  __shared__ C parts[2][kRowThreads / kWarp];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(0xffffffffU, value, step));
  if (group.threads == kWarp) return value;
  const int warps = group.threads / kWarp;
  C* own = parts[parity] + group.id * warps;
  if (group.lane % kWarp == 0) own[group.lane / kWarp] = value;
  group.sync();
  value = own[0];
  for (int k = 1; k < warps; ++k) value = op(value, own[k]);
  return value;
}

template <class T, int N, int K>
struct RowPart {
  Packed<T, N> v[K];
};

/// First value of the thread's vector k.
template <int N>
__device__ int row_index(const RowGroup& group, int k) {
  return (k * group.threads + group.lane) * N;
}

/// The thread's part of a row; zeros beyond its end. N divides dim.
template <int N, int K, class Access, class T>
__device__ RowPart<T, N, K> load_row(const RowGroup& group, const T* row, int dim) {
  RowPart<T, N, K> part = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = row_index<N>(group, k);
    if (i < dim) part.v[k] = load_packed<N, Access>(row + i);
  }
  return part;
}
template <class Access, class T, int N, int K>
__device__ void store_row(const RowGroup& group, T* row, int dim, const RowPart<T, N, K>& part) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = row_index<N>(group, k);
    if (i < dim) store_packed<N, Access>(row + i, part.v[k]);
  }
}

}  // namespace fsdpp::kernels

#include "kernels/embedding.h"

#include "kernels/cuda/rows.cuh"

/// A first launch puts the tokens in order of their rows, without sorting: of `owners` blocks each has every owners-th
/// row, reads all ids and picks its own. Traffic is owners · tokens · 8 bytes from the second-level cache: 8 MiB for
/// 8192 tokens, where the gradient of 32000 x 2048 is 250 MiB. A second launch sums: a block has a strip of columns of
/// 32 rows, far from each other since rows of frequent tokens are often neighbours.
namespace fsdpp::kernels {
namespace {

constexpr unsigned kWholeWarp = 0xffffffffU;

// -- tokens by row ------------------------------------------------------------------------------------------------

constexpr int kGroupThreads = 512;
constexpr int kGroupWarps = kGroupThreads / kWarp;
constexpr int kHeldIds = 16;                        // of a thread
constexpr int kChunk = kGroupThreads * kHeldIds;    // tokens that a block looks at before it writes those that it found
constexpr int kMostOwnRows = 2048;
constexpr int kLeastOwners = 128;                   // a block for each multiprocessor of an H100 or H200, or nearly
constexpr int kRowsOfThread = kMostOwnRows / kGroupThreads;

/// Where a row's tokens are in the order.
struct alignas(8) Range {
  int begin;
  int count;
};

/// Owner o has rows o, o + owners, …
struct Owners {
  int shift = 7;  ///< owners = 2^shift
  int vocab;
  int padding;
  explicit Owners(const EmbeddingBackwardArgs& a) : vocab(static_cast<int>(a.vocab)), padding(-1) {
    if (a.padding_idx >= 0 && a.padding_idx < a.vocab) padding = static_cast<int>(a.padding_idx);
    while ((a.vocab + count() - 1) / count() > kMostOwnRows) ++shift;
  }
  __host__ __device__ int count() const { return 1 << shift; }
  __device__ int owner(int row) const { return row & (count() - 1); }
  __device__ int rows_of(int owner) const { return owner < vocab ? ((vocab - 1 - owner) >> shift) + 1 : 0; }
};
static_assert(kLeastOwners == 1 << 7);

/// Sum over the threads before this one, and over all.
__device__ int sum_before(int value, int* all) {
  __shared__ int warps[kGroupWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kWholeWarp, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == kWarp - 1) warps[warp] = inclusive;
  __syncthreads();
  int before = 0, sum = 0;
#pragma unroll
  for (int k = 0; k < kGroupWarps; ++k) {
    if (k < warp) before += warps[k];
    sum += warps[k];
  }
  __syncthreads();
  *all = sum;
  return before + inclusive - value;
}

/// A chunk's rows; -1 for a token without one. A warp has neighbouring tokens: its lanes', kHeldIds times.
struct HeldRows {
  int row[kHeldIds];
  __device__ static int index(int k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    return (warp * kHeldIds + k) * kWarp + lane;
  }
  __device__ void load(const int64_t* ids, int tokens, const Owners& owners) {
#pragma unroll
    for (int k = 0; k < kHeldIds; ++k) {
      const int64_t id = index(k) < tokens ? ids[index(k)] : -1;
      row[k] = id >= 0 && id < owners.vocab && id != owners.padding ? static_cast<int>(id) : -1;
    }
  }
};

/// next[own row] = how many tokens it has; returns how many of this thread's tokens are those of earlier owners.
__device__ int count_tokens(const HeldRows& held, const Owners& owners, int* next) {
  int earlier = 0;
#pragma unroll
  for (int k = 0; k < kHeldIds; ++k) {
    if (held.row[k] < 0) continue;
    const int owner = owners.owner(held.row[k]);
    earlier += owner < static_cast<int>(blockIdx.x) ? 1 : 0;
    if (owner == static_cast<int>(blockIdx.x)) atomicAdd(next + (held.row[k] >> owners.shift), 1);
  }
  return earlier;
}

/// Turns counts into the places of the rows' first tokens, from `begin` on, and writes the ranges.
__device__ void write_ranges(int* next, int begin, const Owners& owners, Range* ranges) {
  const int rows = owners.rows_of(static_cast<int>(blockIdx.x)), first = static_cast<int>(threadIdx.x) * kRowsOfThread;
  int counts[kRowsOfThread], sum = 0, all = 0;
#pragma unroll
  for (int k = 0; k < kRowsOfThread; ++k) {
    counts[k] = first + k < rows ? next[first + k] : 0;
    sum += counts[k];
  }
  begin += sum_before(sum, &all);
#pragma unroll
  for (int k = 0; k < kRowsOfThread; ++k) {
    if (first + k >= rows) break;
    next[first + k] = begin;
    ranges[((first + k) << owners.shift) + static_cast<int>(blockIdx.x)] = {begin, counts[k]};
    begin += counts[k];
  }
  __syncthreads();
}

/// The block's tokens of a chunk, in their order: own row · kChunk + index in the chunk. Returns how many.
__device__ int list_tokens(const HeldRows& held, const Owners& owners, unsigned* list) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned mine[kHeldIds];
  int found = 0, all = 0;
#pragma unroll
  for (int k = 0; k < kHeldIds; ++k) {
    mine[k] = __ballot_sync(kWholeWarp, held.row[k] >= 0 && owners.owner(held.row[k]) == static_cast<int>(blockIdx.x));
    found += __popc(mine[k]);
  }
  int place = __shfl_sync(kWholeWarp, sum_before(lane == 0 ? found : 0, &all), 0);
#pragma unroll
  for (int k = 0; k < kHeldIds; ++k) {
    if ((mine[k] >> lane) & 1U)
      list[place + __popc(mine[k] & ((1U << lane) - 1U))] =
          static_cast<unsigned>(held.row[k] >> owners.shift) * kChunk + static_cast<unsigned>(HeldRows::index(k));
    place += __popc(mine[k]);
  }
  __syncthreads();
  return all;
}

/// One warp puts the listed tokens behind those of the same rows.
__device__ void place_tokens(const unsigned* list, int count, int first_token, int* next, int* order) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int k = lane; k - lane < count; k += kWarp) {
    const unsigned active = __ballot_sync(kWholeWarp, k < count);
    if (k < count) {
      const unsigned row = list[k] / kChunk, alike = __match_any_sync(active, row);
      const int before = __popc(alike & ((1U << lane) - 1U));
      const int place = next[row];
      order[place + before] = first_token + static_cast<int>(list[k] % kChunk);
      __syncwarp(active);
      if (before == 0) next[row] = place + __popc(alike);
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kGroupThreads)
    group_tokens_kernel(const int64_t* ids, int tokens, Owners owners, Range* ranges, int* order) {
  __shared__ int next[kMostOwnRows];
  __shared__ unsigned list[kChunk];
  for (int r = static_cast<int>(threadIdx.x); r < kMostOwnRows; r += kGroupThreads) next[r] = 0;
  __syncthreads();
  HeldRows held;
  int earlier = 0, all_earlier = 0;
  for (int64_t first = 0; first < tokens; first += kChunk) {
    held.load(ids + first, static_cast<int>(tokens - first), owners);
    earlier += count_tokens(held, owners, next);
  }
  (void)sum_before(earlier, &all_earlier);
  write_ranges(next, all_earlier, owners, ranges);
  for (int64_t first = 0; first < tokens; first += kChunk) {
    if (tokens > kChunk) held.load(ids + first, static_cast<int>(tokens - first), owners);
    const int found = list_tokens(held, owners, list);
    if (threadIdx.x < kWarp) place_tokens(list, found, static_cast<int>(first), next, order);
    __syncthreads();
  }
}

// -- sums ---------------------------------------------------------------------------------------------------------

constexpr int kRun = static_cast<int>(kEmbeddingRun);
static_assert(kRun == kWarp, "a warp holds the tokens of a run, one a lane");
constexpr int kSumWarps = kThreads / kWarp;
constexpr int kBlockRows = 32;  // a lane knows the range of each
constexpr int kStripVectors = 2;

/// Tokens whose loads are under way: 64 bytes a thread.
template <int N, class T>
constexpr int loads_at_once() {
  constexpr int kFit = 64 / (kStripVectors * N * static_cast<int>(sizeof(T)));
  return kFit < 8 ? kFit : 8;
}

/// A lane's part of a strip's columns: vectors that are kWarp vectors apart.
template <class C, int N>
struct Sums {
  static constexpr int kStrip = kStripVectors * kWarp * N;
  Vec<C, N> v[kStripVectors];
  __device__ void add(const Sums& other) {
#pragma unroll
    for (int k = 0; k < kStripVectors; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) v[k].v[j] += other.v[k].v[j];
  }
};

template <class T>
struct Gradient {
  const T* data;
  int64_t dim;
  int64_t column;  ///< of the lane's first value
};

/// The sum of a run. Lane l holds its token l.
template <int N, class T, class C = typename ComputeType<T>::type>
__device__ Sums<C, N> run_sums(const Gradient<T>& grad, int token, int count) {
  constexpr int kTokens = loads_at_once<N, T>();
  Sums<C, N> sums = {};
  for (int first = 0; first < count; first += kTokens) {
    Packed<T, N> in[kTokens][kStripVectors] = {};
#pragma unroll
    for (int s = 0; s < kTokens; ++s) {
      const T* const row = grad.data + __shfl_sync(kWholeWarp, token, first + s) * grad.dim + grad.column;
#pragma unroll
      for (int k = 0; k < kStripVectors; ++k)
        if (first + s < count && grad.column + k * kWarp * N < grad.dim)
          in[s][k] = load_packed<N, StreamingAccess>(row + k * kWarp * N);
    }
#pragma unroll
    for (int s = 0; s < kTokens; ++s)
#pragma unroll
      for (int k = 0; k < kStripVectors; ++k) {
        const Vec<T, N> values = unpack<N>(opaque<N>(in[s][k]));
#pragma unroll
        for (int j = 0; j < N; ++j) sums.v[k].v[j] += to_compute<C>(values.v[j]);
      }
  }
  return sums;
}

/// The sum of a row of many runs, for warp 0: the warps take the runs in turn.
template <int N, class T, class C = typename ComputeType<T>::type>
__device__ Sums<C, N> long_row_sums(const Gradient<T>& grad, const int* order, int count) {
  __shared__ Sums<C, N> runs[kSumWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Sums<C, N> sums = {};
  for (int first = 0; first < count; first += kSumWarps * kRun) {
    const int begin = first + warp * kRun, here = count - begin < kRun ? count - begin : kRun;
    if (here > 0) runs[warp][lane] = run_sums<N>(grad, lane < here ? order[begin + lane] : 0, here);
    __syncthreads();
    for (int k = 0; warp == 0 && k < kSumWarps && first + k * kRun < count; ++k) sums.add(runs[k][lane]);
    __syncthreads();
  }
  return sums;
}

template <int N, class C, class Out>
__device__ void write_sums(const Sums<C, N>& sums, Out* row, int64_t dim, int64_t column, bool accumulate) {
  using Wide = typename ComputeType<C, Out>::type;
#pragma unroll
  for (int k = 0; k < kStripVectors; ++k, column += kWarp * N) {
    if (column >= dim) return;
    Vec<Out, N> out = {};
    if (accumulate) out = load_vec<N, StreamingAccess>(row + column);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Wide total = static_cast<Wide>(sums.v[k].v[j]);
      if (accumulate) total += to_compute<Wide>(out.v[j]);
      from_compute(total, out.v[j]);
    }
    store_vec<N, StreamingAccess>(row + column, out);
  }
}

/// Rows of at most one run: a warp each. Others: the whole block.
template <int N, class T, class Out>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tokens_kernel(const T* grads, const Range* ranges, const int* order, Out* out, int vocab, int64_t dim,
                      int strips, int row_step, bool accumulate) {
  using C = typename ComputeType<T>::type;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first_row = static_cast<int>(blockIdx.x) / strips;
  const Gradient<T> grad{grads, dim, static_cast<int64_t>(blockIdx.x % strips) * Sums<C, N>::kStrip + lane * N};
  const Range own = first_row + lane * row_step < vocab ? ranges[first_row + lane * row_step] : Range{0, 0};
  const int own_first = own.count > 0 ? order[own.begin] : 0;
#pragma unroll 1
  for (int at = warp; at < kBlockRows && first_row + at * row_step < vocab; at += kSumWarps) {
    const int begin = __shfl_sync(kWholeWarp, own.begin, at), count = __shfl_sync(kWholeWarp, own.count, at);
    int token = __shfl_sync(kWholeWarp, own_first, at);
    if (count > kRun || (accumulate && count == 0)) continue;
    if (count > 1) token = lane < count ? order[begin + lane] : 0;
    Out* const row = out + static_cast<int64_t>(first_row + at * row_step) * dim;
    write_sums<N>(run_sums<N>(grad, token, count), row, dim, grad.column, accumulate);
  }
  for (unsigned many = __ballot_sync(kWholeWarp, own.count > kRun); many != 0; many &= many - 1) {
    const int at = __ffs(static_cast<int>(many)) - 1;
    const int begin = __shfl_sync(kWholeWarp, own.begin, at), count = __shfl_sync(kWholeWarp, own.count, at);
    const auto sums = long_row_sums<N>(grad, order + begin, count);
    if (warp == 0)
      write_sums<N>(sums, out + static_cast<int64_t>(first_row + at * row_step) * dim, dim, grad.column, accumulate);
  }
}

// -- launches -----------------------------------------------------------------------------------------------------

template <int N, class T, class Out>
int launch_sums(const EmbeddingBackwardArgs& a, const Range* ranges, const int* order, cudaStream_t stream) {
  constexpr int kStrip = Sums<float, N>::kStrip;
  const int64_t strips = (a.dim + kStrip - 1) / kStrip, groups = (a.vocab + kBlockRows - 1) / kBlockRows,
                blocks = groups * strips;
  if (blocks > INT32_MAX) return static_cast<int>(cudaErrorInvalidValue);
  sum_tokens_kernel<N><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(a.grad), ranges, order, static_cast<Out*>(a.out), static_cast<int>(a.vocab), a.dim,
      static_cast<int>(strips), static_cast<int>(groups), a.accumulate);
  return static_cast<int>(cudaGetLastError());
}

template <class T, class Out>
int launch_sums(const EmbeddingBackwardArgs& a, const Range* ranges, const int* order, cudaStream_t stream) {
  constexpr int kVec = vec_length<T, Out>();
  const bool aligned = is_vec_aligned<kVec>(static_cast<const T*>(a.grad)) && is_vec_aligned<kVec>(static_cast<Out*>(a.out));
  return a.dim % kVec == 0 && aligned ? launch_sums<kVec, T, Out>(a, ranges, order, stream)
                                      : launch_sums<1, T, Out>(a, ranges, order, stream);
}

}  // namespace

size_t embedding_backward_scratch_bytes(int64_t tokens, int64_t vocab) {
  return static_cast<size_t>(vocab) * sizeof(Range) + static_cast<size_t>(tokens) * sizeof(int);
}

int embedding_backward(const EmbeddingBackwardArgs& a, CUstream_st* stream) {
  if (a.vocab <= 0 || a.dim <= 0 || (a.accumulate && a.tokens <= 0)) return 0;
  if (a.tokens > INT32_MAX || a.vocab > INT32_MAX - kBlockRows || a.dim > INT32_MAX)
    return static_cast<int>(cudaErrorInvalidValue);
  auto* const ranges = static_cast<Range*>(a.scratch);
  auto* const order = reinterpret_cast<int*>(ranges + a.vocab);
  const Owners owners(a);
  group_tokens_kernel<<<static_cast<unsigned>(owners.count()), kGroupThreads, 0, stream>>>(
      a.ids, static_cast<int>(a.tokens), owners, ranges, order);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return static_cast<int>(error);
  return with_type(a.dtype, [&](auto t) {
    return with_type(a.out_dtype, [&](auto out) { return launch_sums<decltype(t), decltype(out)>(a, ranges, order, stream); });
  });
}

}  // namespace fsdpp::kernels

#include <cuda/std/type_traits>

#include "kernels/cuda/vector.cuh"

namespace fsdpp::kernels {
namespace {

/// Up to kMaxPackPieces pieces by value; piece k is tiles [first_tile[k], first_tile[k + 1]) of the launch. A tile is
/// what a block copies before it looks for its next one.
struct PieceTable {
  int64_t tile_numel;
  PackPiece pieces[kMaxPackPieces];
  int64_t first_tile[kMaxPackPieces + 1];
  int count;
};
static_assert(sizeof(PieceTable) + 64 <= 4096, "kernel parameters beyond 4 KiB need newer drivers");

template <class Dst, class Src, bool Accumulate>
struct CastOne {
  using C = typename ComputeType<Dst, Src>::type;
  C scale;
  __device__ Dst operator()(Src src, Dst old) const {
    C value = to_compute<C>(src) * scale;
    if constexpr (Accumulate) value += to_compute<C>(old);
    Dst out;
    from_compute(value, out);
    return out;
  }
};
template <class T>
struct CopyOne {
  __device__ T operator()(T src, T) const { return src; }
};

/// dst[i] = op(src[i], dst[i]) for i in [0, n), by one block.
template <bool ReadsDst, class Dst, class Src, class Op>
__device__ void transform_tile(Dst* dst, const Src* src, int64_t n, const Op& op) {
  constexpr int kVec = vec_length<Dst, Src>();
  struct Pair {
    Vec<Src, kVec> in;
    Vec<Dst, kVec> out;
  };
  // Vectors start at the first element at which both sides are aligned; if there is none, elements go one by one.
  int64_t head = sizeof(Dst) <= sizeof(Src) ? values_to_alignment<kVec>(src) : values_to_alignment<kVec>(dst);
  const bool aligned = is_vec_aligned<kVec>(dst + head) && is_vec_aligned<kVec>(src + head);
  const int64_t vectors = aligned && n > head ? (n - head) / kVec : 0;
  if (vectors == 0) head = 0;
  staged_loop(
      threadIdx.x, kThreads, vectors,
      [&](int64_t k) {
        Pair pair{load_vec<kVec>(src + head + k * kVec), {}};
        if constexpr (ReadsDst) pair.out = load_vec<kVec>(dst + head + k * kVec);
        return pair;
      },
      [&](int64_t k, Pair& pair) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) pair.out.v[j] = op(pair.in.v[j], pair.out.v[j]);
        store_vec<kVec>(dst + head + k * kVec, pair.out);
      });
  const int64_t body = vectors * kVec;
  for (int64_t k = threadIdx.x; k < n - body; k += kThreads) {
    const int64_t i = k < head ? k : k + body;
    dst[i] = op(src[i], ReadsDst ? dst[i] : Dst{});
  }
}

template <class Dst>
__device__ void zero_tile(Dst* dst, int64_t n) {
  constexpr int kVec = vec_length<Dst>();
  const int64_t head = values_to_alignment<kVec>(dst);
  const int64_t vectors = n > head ? (n - head) / kVec : 0;
  for (int64_t k = threadIdx.x; k < vectors; k += kThreads) store_vec<kVec>(dst + head + k * kVec, Vec<Dst, kVec>{});
  const int64_t body = vectors * kVec;
  for (int64_t k = threadIdx.x; k < n - body; k += kThreads) dst[k < head ? k : k + body] = Dst{};
}

/// The piece of a tile: the last k with first_tile[k] <= tile.
__device__ int piece_of(const PieceTable& table, int64_t tile) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool ReadsDst, class Dst, class Src, class Op>
__global__ void __launch_bounds__(kThreads) pack_kernel(Dst* dst, const __grid_constant__ PieceTable table, Op op) {
  for (int64_t tile = blockIdx.x; tile < table.first_tile[table.count]; tile += gridDim.x) {
    const int k = piece_of(table, tile);
    const int64_t begin = (tile - table.first_tile[k]) * table.tile_numel;
    const int64_t rest = table.pieces[k].numel - begin;
    const int64_t n = rest < table.tile_numel ? rest : table.tile_numel;
    Dst* out = dst + table.pieces[k].offset + begin;
    const auto* src = static_cast<const Src*>(table.pieces[k].src);
    if (src != nullptr) {
      transform_tile<ReadsDst>(out, src + begin, n, op);
    } else {
      zero_tile(out, n);
    }
  }
}

template <bool ReadsDst, class Dst, class Src, class Op>
int launch(const PackArgs& a, const PieceTable& table, Op op, cudaStream_t stream) {
  unsigned blocks = 0;
  const cudaError_t error = grid_size(table.first_tile[table.count], 4, &blocks);
  if (error != cudaSuccess || blocks == 0) return static_cast<int>(error);
  pack_kernel<ReadsDst, Dst, Src><<<blocks, kThreads, 0, stream>>>(static_cast<Dst*>(a.dst), table, op);
  return static_cast<int>(cudaGetLastError());
}

template <class Dst, class Src>
int launch_as(const PackArgs& a, const PieceTable& table, cudaStream_t stream) {
  using C = typename ComputeType<Dst, Src>::type;
  const auto scale = static_cast<C>(a.scale);
  if (a.accumulate) return launch<true, Dst, Src>(a, table, CastOne<Dst, Src, true>{scale}, stream);
  if constexpr (cuda::std::is_same_v<Dst, Src>) {
    if (a.scale == 1.0) return launch<false, Dst, Src>(a, table, CopyOne<Dst>{}, stream);
  }
  return launch<false, Dst, Src>(a, table, CastOne<Dst, Src, false>{scale}, stream);
}

/// Takes pieces from `next` on until the table is full or the list ends.
PieceTable take_pieces(const PackArgs& a, int& next) {
  PieceTable table{};
  const size_t widest = size_of(a.dst_dtype) > size_of(a.src_dtype) ? size_of(a.dst_dtype) : size_of(a.src_dtype);
  const int64_t tile = static_cast<int64_t>(16 / widest) * kThreads * kStages;
  table.tile_numel = tile;
  while (next < a.count && table.count < kMaxPackPieces) {
    const PackPiece& piece = a.pieces[next++];
    if (piece.numel <= 0 || (piece.src == nullptr && a.accumulate)) continue;
    table.pieces[table.count] = piece;
    table.first_tile[table.count + 1] = table.first_tile[table.count] + (piece.numel + tile - 1) / tile;
    ++table.count;
  }
  return table;
}

}  // namespace

int pack(const PackArgs& a, CUstream_st* stream) {
  for (int next = 0; next < a.count;) {
    const PieceTable table = take_pieces(a, next);
    const int error = with_type(a.dst_dtype, [&](auto dst) {
      return with_type(a.src_dtype,
                       [&](auto src) { return launch_as<decltype(dst), decltype(src)>(a, table, stream); });
    });
    if (error != 0) return error;
  }
  return 0;
}

int cast(const CastArgs& a, CUstream_st* stream) {
  if (a.dst == a.src && a.scale == 1.0 && !a.accumulate) return 0;
  const PackPiece piece{a.src, 0, a.numel};
  return pack({a.dst, a.dst_dtype, a.src_dtype, &piece, 1, a.scale, a.accumulate}, stream);
}

}  // namespace fsdpp::kernels

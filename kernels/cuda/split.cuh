#pragma once
#include "kernels/cuda/vector.cuh"

/// Kernels that update several arrays element by element: vectors where all arrays are aligned alike, single values at
/// both ends or, where they are not, everywhere.
namespace fsdpp::kernels {

struct Split {
  int64_t numel = 0;
  int64_t head = 0;     ///< values before the first vector
  int64_t vectors = 0;  ///< 0 when the arrays are not aligned alike
};

/// The split of arrays of `numel` values in vectors of N; a null array takes no part.
template <int N, class First, class... Rest>
Split split_of(int64_t numel, const First* first, const Rest*... rest) {
  Split split{numel, values_to_alignment<N>(first), 0};
  const bool alike =
      is_vec_aligned<N>(first + split.head) && (... && (rest == nullptr || is_vec_aligned<N>(rest + split.head)));
  if (alike && numel > split.head) split.vectors = (numel - split.head) / N;
  if (split.vectors == 0) split.head = 0;
  return split;
}

/// Blocks for a kernel that calls for_split.
inline cudaError_t grid_size(const Split& split, unsigned* blocks) {
  const int64_t work = split.vectors > 0 ? split.vectors : split.numel;
  return grid_size((work + kThreads - 1) / kThreads, 4, blocks);
}

/// kernel(args…, split) on `stream`, for a kernel that calls for_split. Returns a cudaError_t.
template <class Kernel, class... Args>
int launch_split(Kernel kernel, const Split& split, cudaStream_t stream, const Args&... args) {
  unsigned blocks = 0;
  if (const cudaError_t error = grid_size(split, &blocks); error != cudaSuccess) return static_cast<int>(error);
  kernel<<<blocks, kThreads, 0, stream>>>(args..., split);
  return static_cast<int>(cudaGetLastError());
}

template <int N>
struct Lanes {
  static constexpr int kCount = N;
};

/// Calls update(Lanes<N>, first element) for this thread's part of the vectors, and with Lanes<1> for its single
/// values.
template <int N, class Update>
__device__ void for_split(const Split& split, Update update) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = first; k < split.vectors; k += stride) update(Lanes<N>(), split.head + k * N);
  const int64_t body = split.vectors * N;
  for (int64_t k = first; k < split.numel - body; k += stride) update(Lanes<1>(), k < split.head ? k : k + body);
}

/// The same with update cut in two, use(lanes, i, load(lanes, i)), so that several loads are under way (staged_loop).
template <int N, class Load, class Use>
__device__ void for_split_staged(const Split& split, Load load, Use use) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto at = [&](int64_t k) { return split.head + k * N; };
  staged_loop(
      first, stride, split.vectors, [&](int64_t k) { return load(Lanes<N>(), at(k)); },
      [&](int64_t k, const auto& in) { use(Lanes<N>(), at(k), in); });
  const int64_t body = split.vectors * N;
  for (int64_t k = first; k < split.numel - body; k += stride) {
    const int64_t i = k < split.head ? k : k + body;
    use(Lanes<1>(), i, load(Lanes<1>(), i));
  }
}

}  // namespace fsdpp::kernels

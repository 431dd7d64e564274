#include "kernels/cuda/vector.cuh"

namespace fsdpp::kernels {
namespace {

template <class T>
__device__ T scaled(T x, typename ComputeType<T>::type factor) {
  T out;
  from_compute(to_compute<typename ComputeType<T>::type>(x) * factor, out);
  return out;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* data, int64_t numel, int64_t head, int64_t vectors, const double* coefficient) {
  const auto factor = static_cast<typename ComputeType<T>::type>(*coefficient);
  if (factor == 1) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  constexpr int kVec = vec_length<T>();
  staged_loop(
      first, stride, vectors, [&](int64_t k) { return load_vec<kVec>(data + head + k * kVec); },
      [&](int64_t k, Vec<T, kVec>& x) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) x.v[j] = scaled(x.v[j], factor);
        store_vec<kVec>(data + head + k * kVec, x);
      });
  const int64_t body = vectors * kVec;
  for (int64_t k = first; k < numel - body; k += stride) {
    T& x = data[k < head ? k : k + body];
    x = scaled(x, factor);
  }
}

}  // namespace

int scale_by(void* data, DType dtype, int64_t numel, const double* coefficient, CUstream_st* stream) {
  if (numel <= 0) return 0;
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kVec = vec_length<T>();
    auto* p = static_cast<T*>(data);
    int64_t head = values_to_alignment<kVec>(p);
    const int64_t vectors = numel > head ? (numel - head) / kVec : 0;
    if (vectors == 0) head = 0;
    unsigned blocks = 0;
    const cudaError_t error = grid_size((vectors + kThreads * kStages) / (kThreads * kStages), 4, &blocks);
    if (error != cudaSuccess) return static_cast<int>(error);
    scale_kernel<<<blocks, kThreads, 0, stream>>>(p, numel, head, vectors, coefficient);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace fsdpp::kernels

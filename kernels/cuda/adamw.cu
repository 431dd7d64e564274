#include <cuda/std/type_traits>

#include "kernels/adamw_scalars.h"
#include "kernels/cuda/vector.cuh"

namespace fsdpp::kernels {
namespace {

template <class P, class G>
struct Pointers {
  using C = typename ComputeType<P>::type;
  P* param;
  const G* grad;
  C* exp_avg;
  C* exp_avg_sq;
  void* copy;
  DType copy_dtype;
  static constexpr int kVec = vec_length<P, G, C>();
  int64_t numel;
  int64_t head;     // elements before the first vector
  int64_t vectors;  // 0 when the pointers are not aligned alike
};

/// The same operations in the same order as the CPU twin.
template <class C>
__device__ void update(const AdamWScalars<C>& s, C grad_scale, C grad, C& p, C& m, C& v) {
  const C g = grad * grad_scale;
  m = m * s.beta1 + g * s.one_minus_beta1;
  v = v * s.beta2 + s.one_minus_beta2 * g * g;
  const C denominator = sqrt(v) / s.sqrt_bias_correction2 + s.eps;
  p = p * s.decay - s.step_size * m / denominator;
}

template <int N, class T, class C>
__device__ void store_copy_as(void* copy, int64_t i, const C (&values)[N]) {
  Vec<T, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) from_compute(values[j], out.v[j]);
  store_vec<N>(static_cast<T*>(copy) + i, out);
}

template <int N, class C>
__device__ void store_copy(void* copy, DType dtype, int64_t i, const C (&values)[N]) {
  if (copy == nullptr) return;
  switch (dtype) {
    case DType::F32:
      return store_copy_as<N, float>(copy, i, values);
    case DType::F64:
      return store_copy_as<N, double>(copy, i, values);
    case DType::F16:
      return store_copy_as<N, __half>(copy, i, values);
    case DType::BF16:
      return store_copy_as<N, __nv_bfloat16>(copy, i, values);
  }
}

/// N elements from i on.
template <int N, class P, class G, class C>
__device__ void update_at(const Pointers<P, G>& t, int64_t i, const AdamWScalars<C>& s, C grad_scale) {
  Vec<P, N> p = load_vec<N>(t.param + i);
  const Vec<G, N> g = load_vec<N>(t.grad + i);
  Vec<C, N> m = load_vec<N>(t.exp_avg + i);
  Vec<C, N> v = load_vec<N>(t.exp_avg_sq + i);
  C updated[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    updated[j] = to_compute<C>(p.v[j]);
    update(s, grad_scale, to_compute<C>(g.v[j]), updated[j], m.v[j], v.v[j]);
    from_compute(updated[j], p.v[j]);
  }
  store_vec<N>(t.param + i, p);
  store_vec<N>(t.exp_avg + i, m);
  store_vec<N>(t.exp_avg_sq + i, v);
  store_copy<N>(t.copy, t.copy_dtype, i, updated);
}

template <class P, class G, class C>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Pointers<P, G> t, AdamWScalars<C> s, const float* grad_scale_device) {
  const C grad_scale = grad_scale_device == nullptr ? s.grad_scale : s.grad_scale * static_cast<C>(*grad_scale_device);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  constexpr int kVec = Pointers<P, G>::kVec;
  for (int64_t k = first; k < t.vectors; k += stride) update_at<kVec>(t, t.head + k * kVec, s, grad_scale);
  const int64_t body = t.vectors * kVec;
  for (int64_t k = first; k < t.numel - body; k += stride) update_at<1>(t, k < t.head ? k : k + body, s, grad_scale);
}

bool copy_is_aligned(const AdamWArgs& a, int64_t head, int length) {
  if (a.param_copy == nullptr) return true;
  const size_t bytes = size_of(a.copy_dtype) * static_cast<size_t>(length);
  const auto address = reinterpret_cast<uintptr_t>(a.param_copy) + static_cast<uintptr_t>(head) * size_of(a.copy_dtype);
  return address % (bytes < 16 ? bytes : 16) == 0;
}

template <class P, class G>
int launch_as(const AdamWArgs& a, cudaStream_t stream) {
  using C = typename ComputeType<P>::type;
  constexpr int kVec = Pointers<P, G>::kVec;
  Pointers<P, G> t{static_cast<P*>(a.param),
                   static_cast<const G*>(a.grad),
                   static_cast<C*>(a.exp_avg),
                   static_cast<C*>(a.exp_avg_sq),
                   a.param_copy,
                   a.copy_dtype,
                   a.numel,
                   values_to_alignment<kVec>(static_cast<const P*>(a.param)),
                   0};
  if (is_vec_aligned<kVec>(t.param + t.head) && is_vec_aligned<kVec>(t.grad + t.head) &&
      is_vec_aligned<kVec>(t.exp_avg + t.head) && is_vec_aligned<kVec>(t.exp_avg_sq + t.head) &&
      copy_is_aligned(a, t.head, kVec) && a.numel > t.head) {
    t.vectors = (a.numel - t.head) / kVec;
  }
  if (t.vectors == 0) t.head = 0;
  const int64_t work = t.vectors > 0 ? t.vectors : a.numel;
  unsigned blocks = 0;
  const cudaError_t error = grid_size((work + kThreads - 1) / kThreads, 4, &blocks);
  if (error != cudaSuccess) return static_cast<int>(error);
  adamw_kernel<P, G, C><<<blocks, kThreads, 0, stream>>>(t, AdamWScalars<C>(a), a.grad_scale_device);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int adamw(const AdamWArgs& a, CUstream_st* stream) {
  if (a.numel <= 0) return 0;
  return with_type(a.param_dtype, [&](auto param) {
    return with_type(a.grad_dtype, [&](auto grad) { return launch_as<decltype(param), decltype(grad)>(a, stream); });
  });
}

}  // namespace fsdpp::kernels

#include "kernels/cuda/split.cuh"
#include "kernels/optim_scalars.h"

namespace fsdpp::kernels {
namespace {

template <class P, class G>
struct Arrays {
  using C = typename ComputeType<P>::type;
  static constexpr int kVec = vec_length<P, G, C>();
  P* param;
  const G* grad;
  C* buffer;  // null without momentum
};

/// d becomes the direction of the update; the buffer of N elements from `buffer` on is updated.
template <int N, class C>
__device__ void apply_momentum(const SGDScalars<C>& s, C* buffer, C (&d)[N]) {
  Vec<C, N> b;
  if (!s.first) b = load_vec<N>(buffer);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    b.v[j] = s.first ? d[j] : b.v[j] * s.momentum + d[j] * s.one_minus_dampening;
    d[j] = s.nesterov ? d[j] + s.momentum * b.v[j] : b.v[j];
  }
  store_vec<N>(buffer, b);
}

/// N elements from i on: the same operations in the same order as the CPU twin.
template <int N, class P, class G, class C>
__device__ void update_at(const Arrays<P, G>& t, int64_t i, const SGDScalars<C>& s) {
  Vec<P, N> p = load_vec<N>(t.param + i);
  const Vec<G, N> g = load_vec<N>(t.grad + i);
  C d[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    d[j] = to_compute<C>(g.v[j]) * s.grad_scale;
    if (s.weight_decay != 0) d[j] = d[j] + s.weight_decay * to_compute<C>(p.v[j]);
  }
  if (t.buffer != nullptr) apply_momentum(s, t.buffer + i, d);
#pragma unroll
  for (int j = 0; j < N; ++j) from_compute(to_compute<C>(p.v[j]) - s.lr * d[j], p.v[j]);
  store_vec<N>(t.param + i, p);
}

template <class P, class G, class C>
__global__ void __launch_bounds__(kThreads) sgd_kernel(Arrays<P, G> t, SGDScalars<C> given, const SGDScalars<C>* numbers, Split split) {
  const SGDScalars<C> s = numbers != nullptr ? *numbers : given;
  for_split<Arrays<P, G>::kVec>(split, [&](auto lanes, int64_t i) { update_at<decltype(lanes)::kCount>(t, i, s); });
}

template <class P, class G>
int launch_as(const SGDArgs& a, cudaStream_t stream) {
  using C = typename ComputeType<P>::type;
  const Arrays<P, G> t{static_cast<P*>(a.param), static_cast<const G*>(a.grad), static_cast<C*>(a.momentum_buffer)};
  const Split split = split_of<Arrays<P, G>::kVec>(a.numel, t.param, t.grad, t.buffer);
  return launch_split(sgd_kernel<P, G, C>, split, stream, t, SGDScalars<C>(a), static_cast<const SGDScalars<C>*>(a.numbers));
}

}  // namespace

int sgd(const SGDArgs& a, CUstream_st* stream) {
  if (a.numel <= 0) return 0;
  return with_type(a.param_dtype, [&](auto param) {
    return with_type(a.grad_dtype, [&](auto grad) { return launch_as<decltype(param), decltype(grad)>(a, stream); });
  });
}

}  // namespace fsdpp::kernels

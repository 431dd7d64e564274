#include "kernels/activation.h"

#include "kernels/cuda/exponential.cuh"
#include "kernels/cuda/split.cuh"

namespace fsdpp::kernels {
namespace {

template <class T>
struct Forward {
  T* out;
  const T* h;
  const T* up;
};

template <class T, int N, bool Gated>
struct Inputs {
  Packed<T, N> h, up;
  __device__ Inputs(const Forward<T>& a, int64_t i) : h(load_packed<N, StreamingAccess>(a.h + i)) {
    if constexpr (Gated) up = load_packed<N, StreamingAccess>(a.up + i);
  }
  Inputs() = default;
};

template <class T, int N, bool Gated>
__device__ void forward_at(const Forward<T>& a, int64_t i, const Inputs<T, N, Gated>& in) {
  using C = typename ComputeType<T>::type;
  using P = Precision<T>;
  Vec<T, N> h = unpack<N>(in.h);
  Vec<T, N> up;
  if constexpr (Gated) up = unpack<N>(in.up);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C x = to_compute<C>(h.v[j]);
    C value = x * P::divide(C(1), C(1) + P::exp(-x));
    if constexpr (Gated) value *= to_compute<C>(up.v[j]);
    from_compute(value, h.v[j]);
  }
  store_vec<N>(a.out + i, h);
}

template <class T>
struct Backward {
  const T* grad_out;
  const T* h;
  const T* up;
  T* grad_h;
  T* grad_up;
  T* out;
};

template <class T, int N, bool Gated>
__device__ void backward_at(const Backward<T>& a, int64_t i) {
  using C = typename ComputeType<T>::type;
  using P = Precision<T>;
  Vec<T, N> grad = load_vec<N, StreamingAccess>(a.grad_out + i);
  Vec<T, N> h = load_vec<N, StreamingAccess>(a.h + i);
  Vec<T, N> up;
  if constexpr (Gated) up = load_vec<N, StreamingAccess>(a.up + i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C x = to_compute<C>(h.v[j]);
    const C s = P::divide(C(1), C(1) + P::exp(-x));
    const C value = x * s;
    const C slope = s * (C(1) + x * (C(1) - s));
    C g = to_compute<C>(grad.v[j]);
    if constexpr (Gated) {
      const C u = to_compute<C>(up.v[j]);
      from_compute(g * value, up.v[j]);
      from_compute(value * u, h.v[j]);
      g *= u;
    } else {
      from_compute(value, h.v[j]);
    }
    from_compute(g * slope, grad.v[j]);
  }
  store_vec<N>(a.grad_h + i, grad);
  if constexpr (Gated) store_vec<N>(a.grad_up + i, up);
  if (a.out != nullptr) store_vec<N>(a.out + i, h);
}

template <class T, bool Gated>
__global__ void __launch_bounds__(kThreads) forward_kernel(Forward<T> a, Split split) {
  for_split_staged<vec_length<T>()>(
      split, [&](auto lanes, int64_t i) { return Inputs<T, decltype(lanes)::kCount, Gated>(a, i); },
      [&](auto lanes, int64_t i, const auto& in) { forward_at<T, decltype(lanes)::kCount, Gated>(a, i, in); });
}
template <class T, bool Gated>
__global__ void __launch_bounds__(kThreads) backward_kernel(Backward<T> a, Split split) {
  for_split<vec_length<T>()>(split,
                             [&](auto lanes, int64_t i) { backward_at<T, decltype(lanes)::kCount, Gated>(a, i); });
}

}  // namespace

int silu(const SiluArgs& args, CUstream_st* stream) {
  if (args.numel <= 0) return 0;
  return with_type(args.dtype, [&](auto t) {
    using T = decltype(t);
    const Forward<T> a{static_cast<T*>(args.out), static_cast<const T*>(args.h), static_cast<const T*>(args.up)};
    const Split split = split_of<vec_length<T>()>(args.numel, a.h, a.out, a.up);
    return launch_split(a.up != nullptr ? forward_kernel<T, true> : forward_kernel<T, false>, split, stream, a);
  });
}

int silu_backward(const SiluBackwardArgs& args, CUstream_st* stream) {
  if (args.numel <= 0) return 0;
  return with_type(args.dtype, [&](auto t) {
    using T = decltype(t);
    const Backward<T> a{static_cast<const T*>(args.grad_out), static_cast<const T*>(args.h),
                        static_cast<const T*>(args.up),       static_cast<T*>(args.grad_h),
                        static_cast<T*>(args.grad_up),        static_cast<T*>(args.out)};
    const Split split = split_of<vec_length<T>()>(args.numel, a.h, a.grad_out, a.up, a.grad_h, a.grad_up, a.out);
    return launch_split(a.up != nullptr ? backward_kernel<T, true> : backward_kernel<T, false>, split, stream, a);
  });
}

}  // namespace fsdpp::kernels

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
  C* exp_avg;
  C* exp_avg_sq;
  C* max_exp_avg_sq;  // null without AMSGrad
  void* cast;         // null: none
  DType cast_dtype;
};

/// The new parameters once more, in another type.
template <class T, int N, class P>
__device__ void store_cast_as(void* cast, int64_t i, const Vec<P, N>& p) {
  Vec<T, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) from_compute(p.v[j], out.v[j]);
  store_vec<N>(static_cast<T*>(cast) + i, out);
}
template <int N, class P>
__device__ void store_cast(void* cast, DType dtype, int64_t i, const Vec<P, N>& p) {
  if (dtype == DType::BF16) {
    store_cast_as<__nv_bfloat16>(cast, i, p);
  } else if (dtype == DType::F16) {
    store_cast_as<__half>(cast, i, p);
  } else {
    store_cast_as<float>(cast, i, p);
  }
}

template <class C>
__device__ C larger_or_nan(C x, C largest) {
  return x > largest || x != x ? x : largest;
}

/// N elements from i on: the same operations in the same order as the CPU twin.
template <int N, class P, class G, class C>
__device__ void update_at(const Arrays<P, G>& t, int64_t i, const AdamWScalars<C>& s) {
  Vec<P, N> p = load_vec<N>(t.param + i);
  const Vec<G, N> grad = load_vec<N>(t.grad + i);
  Vec<C, N> m = load_vec<N>(t.exp_avg + i);
  Vec<C, N> v = load_vec<N>(t.exp_avg_sq + i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C g = to_compute<C>(grad.v[j]) * s.grad_scale;
    m.v[j] = m.v[j] * s.beta1 + g * s.one_minus_beta1;
    v.v[j] = v.v[j] * s.beta2 + s.one_minus_beta2 * g * g;
  }
  store_vec<N>(t.exp_avg + i, m);
  store_vec<N>(t.exp_avg_sq + i, v);
  if (t.max_exp_avg_sq != nullptr) {
    const Vec<C, N> largest = load_vec<N>(t.max_exp_avg_sq + i);
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = larger_or_nan(v.v[j], largest.v[j]);
    store_vec<N>(t.max_exp_avg_sq + i, v);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C denominator = sqrt(v.v[j]) / s.sqrt_bias_correction2 + s.eps;
    from_compute(to_compute<C>(p.v[j]) * s.decay - s.step_size * m.v[j] / denominator, p.v[j]);
  }
  store_vec<N>(t.param + i, p);
  if constexpr (sizeof(P) >= sizeof(float)) {
    if (t.cast != nullptr) store_cast(t.cast, t.cast_dtype, i, p);
  }
}

template <class P, class G, class C>
__global__ void __launch_bounds__(kThreads) adamw_kernel(Arrays<P, G> t, AdamWScalars<C> given, const AdamWScalars<C>* numbers, Split split) {
  const AdamWScalars<C> s = numbers != nullptr ? *numbers : given;
  for_split<Arrays<P, G>::kVec>(split, [&](auto lanes, int64_t i) { update_at<decltype(lanes)::kCount>(t, i, s); });
}

template <class P, class G>
int launch_as(const AdamWArgs& a, cudaStream_t stream) {
  using C = typename ComputeType<P>::type;
  const Arrays<P, G> t{static_cast<P*>(a.param), static_cast<const G*>(a.grad), static_cast<C*>(a.exp_avg),
                       static_cast<C*>(a.exp_avg_sq), static_cast<C*>(a.max_exp_avg_sq), a.cast, a.cast_dtype};
  Split split;
  const auto split_with = [&](auto* cast) {
    split = split_of<Arrays<P, G>::kVec>(a.numel, t.param, t.grad, t.exp_avg, t.exp_avg_sq, t.max_exp_avg_sq, cast);
  };
  if (a.cast_dtype == DType::F32) {
    split_with(static_cast<const float*>(a.cast));
  } else {
    split_with(static_cast<const __half*>(a.cast));
  }
  return launch_split(adamw_kernel<P, G, C>, split, stream, t, AdamWScalars<C>(a), static_cast<const AdamWScalars<C>*>(a.numbers));
}

}  // namespace

int adamw(const AdamWArgs& a, CUstream_st* stream) {
  if (a.numel <= 0) return 0;
  if (a.cast != nullptr && (size_of(a.param_dtype) < size_of(DType::F32) || a.cast_dtype == DType::F64)) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  return with_type(a.param_dtype, [&](auto param) {
    return with_type(a.grad_dtype, [&](auto grad) { return launch_as<decltype(param), decltype(grad)>(a, stream); });
  });
}

}  // namespace fsdpp::kernels

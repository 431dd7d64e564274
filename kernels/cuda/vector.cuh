#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/kernels.h"

/// Conversions and 16-byte accesses shared by the kernels. Arithmetic is in C: float, or double where a side is double.
namespace fsdpp::kernels {

inline constexpr int kThreads = 256;

template <class A, class B = float>
struct ComputeType {
  using type = float;
};
template <class B>
struct ComputeType<double, B> {
  using type = double;
};
template <>
struct ComputeType<float, double> {
  using type = double;
};
template <>
struct ComputeType<__half, double> {
  using type = double;
};
template <>
struct ComputeType<__nv_bfloat16, double> {
  using type = double;
};

template <class C>
__device__ C to_compute(float x) {
  return static_cast<C>(x);
}
template <class C>
__device__ C to_compute(double x) {
  return static_cast<C>(x);
}
template <class C>
__device__ C to_compute(__half x) {
  return static_cast<C>(__half2float(x));
}
template <class C>
__device__ C to_compute(__nv_bfloat16 x) {
  return static_cast<C>(__bfloat162float(x));
}

template <class C>
__device__ void from_compute(C x, float& out) {
  out = static_cast<float>(x);
}
template <class C>
__device__ void from_compute(C x, double& out) {
  out = static_cast<double>(x);
}
template <class C>
__device__ void from_compute(C x, __half& out) {
  out = __float2half_rn(static_cast<float>(x));
}
template <class C>
__device__ void from_compute(C x, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(static_cast<float>(x));
}

/// An unsigned type of this many bytes, which the compiler loads and stores in one instruction.
template <int Bytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

/// N neighbours, moved in words of 16 bytes (less where they are less); the address must be a multiple of that.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
};
/// Plain accesses, and those that leave the caches to others (read or written once).
struct CachedAccess {
  template <class W>
  __device__ static W load(const W* p) {
    return *p;
  }
  template <class W>
  __device__ static void store(W* p, W x) {
    *p = x;
  }
};
struct StreamingAccess {
  template <class W>
  __device__ static W load(const W* p) {
    return __ldcs(p);
  }
  template <class W>
  __device__ static void store(W* p, W x) {
    __stcs(p, x);
  }
};
/// A Vec as it lies in memory. What lives across a loop's turns is kept so: the compiler gives each 16-bit value of a
/// Vec a register of its own.
template <class T, int N>
struct Packed {
  using W = typename Word<alignof(Vec<T, N>)>::type;
  static constexpr int kWords = sizeof(Vec<T, N>) / sizeof(W);
  W words[kWords];
};
template <int N, class T>
__device__ Vec<T, N> unpack(const Packed<T, N>& packed) {
  union {
    Packed<T, N> packed;
    Vec<T, N> values;
  } u = {packed};
  return u.values;
}
template <int N, class T>
__device__ Packed<T, N> packed(const Vec<T, N>& values) {
  union {
    Packed<T, N> packed;
    Vec<T, N> values;
  } u = {};
  u.values = values;
  return u.packed;
}
/// The same value, of which the compiler knows nothing: so it unpacks it again where it is used, and does not keep it
/// unpacked, in two to four times the registers, from use to use.
template <int N, class T>
__device__ Packed<T, N> opaque(Packed<T, N> x) {
  if constexpr (alignof(Packed<T, N>) == 16) {
#pragma unroll
    for (int k = 0; k < Packed<T, N>::kWords; ++k)
      asm volatile("" : "+r"(x.words[k].x), "+r"(x.words[k].y), "+r"(x.words[k].z), "+r"(x.words[k].w));
  }
  return x;
}
template <int N, class Access = CachedAccess, class T>
__device__ Packed<T, N> load_packed(const T* p) {
  Packed<T, N> x;
#pragma unroll
  for (int k = 0; k < Packed<T, N>::kWords; ++k)
    x.words[k] = Access::load(reinterpret_cast<const typename Packed<T, N>::W*>(p) + k);
  return x;
}
template <int N, class Access = CachedAccess, class T>
__device__ void store_packed(T* p, const Packed<T, N>& x) {
#pragma unroll
  for (int k = 0; k < Packed<T, N>::kWords; ++k)
    Access::store(reinterpret_cast<typename Packed<T, N>::W*>(p) + k, x.words[k]);
}
template <int N, class Access = CachedAccess, class T>
__device__ Vec<T, N> load_vec(const T* p) {
  return unpack<N>(load_packed<N, Access>(p));
}
template <int N, class Access = CachedAccess, class T>
__device__ void store_vec(T* p, const Vec<T, N>& x) {
  store_packed<N, Access>(p, packed<N>(x));
}

/// How many values of the widest of these types make 16 bytes.
template <class A, class B = A, class C = A>
constexpr int vec_length() {
  constexpr size_t kAB = sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B);
  return static_cast<int>(16 / (kAB > sizeof(C) ? kAB : sizeof(C)));
}

/// use(k, load(k)) for k = first, first + stride, … below count, with kStages loads under way before the first of them
/// is used: the compiler may not move loads above stores that could alias.
constexpr int kStages = 4;
template <class Load, class Use>
__device__ void staged_loop(int64_t first, int64_t stride, int64_t count, Load load, Use use) {
  int64_t k = first;
  for (; k + (kStages - 1) * stride < count; k += kStages * stride) {
    decltype(load(k)) in[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) in[s] = load(k + s * stride);
#pragma unroll
    for (int s = 0; s < kStages; ++s) use(k + s * stride, in[s]);
  }
  for (; k < count; k += stride) {
    auto in = load(k);
    use(k, in);
  }
}

/// Whether N values of T may be accessed at p as a Vec.
template <int N, class T>
__host__ __device__ bool is_vec_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vec<T, N>) == 0;
}
/// How many values lie before the first address that is_vec_aligned, at most N - 1.
template <int N, class T>
__host__ __device__ int64_t values_to_alignment(const T* p) {
  constexpr uintptr_t kBytes = alignof(Vec<T, N>);
  return static_cast<int64_t>((kBytes - reinterpret_cast<uintptr_t>(p) % kBytes) % kBytes / sizeof(T));
}

/// Blocks for `work` blocks' worth of work in a grid-stride loop: all of them, or as many as fill the device `waves`
/// times.
inline cudaError_t grid_size(int64_t work, unsigned waves, unsigned* blocks) {
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = static_cast<int64_t>(processors) * (2048 / kThreads) * waves;
  *blocks = static_cast<unsigned>(work < most ? work : most);
  return error;
}

/// Calls f(T{}) with the C++ type of `dtype`; returns its result.
template <class F>
int with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::F32:
      return f(float{});
    case DType::F64:
      return f(double{});
    case DType::F16:
      return f(__half{});
    case DType::BF16:
      return f(__nv_bfloat16{});
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace fsdpp::kernels

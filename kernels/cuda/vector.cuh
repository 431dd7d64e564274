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
__device__ C to_compute(float x) { return static_cast<C>(x); }
template <class C>
__device__ C to_compute(double x) { return static_cast<C>(x); }
template <class C>
__device__ C to_compute(__half x) { return static_cast<C>(__half2float(x)); }
template <class C>
__device__ C to_compute(__nv_bfloat16 x) { return static_cast<C>(__bfloat162float(x)); }

template <class C>
__device__ void from_compute(C x, float& out) { out = static_cast<float>(x); }
template <class C>
__device__ void from_compute(C x, double& out) { out = static_cast<double>(x); }
template <class C>
__device__ void from_compute(C x, __half& out) { out = __float2half_rn(static_cast<float>(x)); }
template <class C>
__device__ void from_compute(C x, __nv_bfloat16& out) { out = __float2bfloat16_rn(static_cast<float>(x)); }

/// N neighbours. Loads and stores move 16 bytes at a time (8 where N values are fewer); the address must allow it.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
};
template <int N, class T>
__device__ Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T>
__device__ void store_vec(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
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

/// Blocks for `work` blocks' worth of work in a grid-stride loop: all of them, or as many as fill the device `waves` times.
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
    case DType::F32: return f(float{});
    case DType::F64: return f(double{});
    case DType::F16: return f(__half{});
    case DType::BF16: return f(__nv_bfloat16{});
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace fsdpp::kernels

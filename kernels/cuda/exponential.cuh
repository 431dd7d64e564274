#pragma once
#include "kernels/cuda/vector.cuh"

/// Exponentials and quotients as exact as an array of T needs them.
namespace fsdpp::kernels {

template <class T>
struct Exact {
  using C = typename ComputeType<T>::type;
  __device__ static C exp(C x) { return ::exp(x); }
  __device__ static C divide(C x, C y) { return x / y; }
};
struct Fast {
  __device__ static float exp(float x) { return __expf(x); }
  __device__ static float divide(float x, float y) { return __fdividef(x, y); }
};
template <class T>
struct Precision : Exact<T> {};
template <>
struct Precision<__half> : Fast {};
template <>
struct Precision<__nv_bfloat16> : Fast {};

}  // namespace fsdpp::kernels

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/half.h"
#include "kernels/kernels.h"

/// The CPU twins work block by block: load a block as the compute type C (float or double), compute, store it. A block
/// stays in the first-level cache, and each loop is over one type only.
namespace fsdpp::kernels::cpu {

inline constexpr int64_t kBlock = 512;

template <class C>
inline constexpr DType kDTypeOf = sizeof(C) == 8 ? DType::F64 : DType::F32;

inline const char* at(const void* base, DType dtype, int64_t index) {
  return static_cast<const char*>(base) + index * static_cast<int64_t>(size_of(dtype));
}
inline char* at(void* base, DType dtype, int64_t index) {
  return static_cast<char*>(base) + index * static_cast<int64_t>(size_of(dtype));
}

/// out[0 … n) = src[begin … begin + n) as C.
template <class C>
void load(const void* src, DType dtype, int64_t begin, int64_t n, C* __restrict out) {
  const char* p = at(src, dtype, begin);
  switch (dtype) {
    case DType::F32:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(reinterpret_cast<const float*>(p)[i]);
      break;
    case DType::F64:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(reinterpret_cast<const double*>(p)[i]);
      break;
    case DType::F16:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(to_float(reinterpret_cast<const Half*>(p)[i]));
      break;
    case DType::BF16:
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(to_float(reinterpret_cast<const BFloat16*>(p)[i]));
      break;
  }
}

/// dst[begin … begin + n) = in[0 … n). A double goes to 16 bits by way of float, as in PyTorch.
template <class C>
void store(void* dst, DType dtype, int64_t begin, int64_t n, const C* __restrict in) {
  char* p = at(dst, dtype, begin);
  switch (dtype) {
    case DType::F32:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(p)[i] = static_cast<float>(in[i]);
      break;
    case DType::F64:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<double*>(p)[i] = static_cast<double>(in[i]);
      break;
    case DType::F16:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<Half*>(p)[i] = to_half(static_cast<float>(in[i]));
      break;
    case DType::BF16:
      for (int64_t i = 0; i < n; ++i) reinterpret_cast<BFloat16*>(p)[i] = to_bfloat16(static_cast<float>(in[i]));
      break;
  }
}

/// Calls body(begin, n) for each block of [0, numel).
template <class Body>
void for_blocks(int64_t numel, Body&& body) {
  for (int64_t begin = 0; begin < numel; begin += kBlock) body(begin, std::min(kBlock, numel - begin));
}

}  // namespace fsdpp::kernels::cpu

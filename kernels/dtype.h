#pragma once
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace fsdpp::kernels {

enum class DType : int { F32, F64, F16, BF16 };
[[nodiscard]] constexpr size_t size_of(DType t) { return t == DType::F64 ? 8 : t == DType::F32 ? 4 : 2; }

/// What sums are computed and kept in: fp32, or fp64 for F64.
[[nodiscard]] constexpr DType compute_type(DType t) { return t == DType::F64 ? DType::F64 : DType::F32; }

}  // namespace fsdpp::kernels

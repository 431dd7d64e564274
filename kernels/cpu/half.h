#pragma once
#include <cstdint>
#include <cstring>

/// 16-bit floating-point numbers as bits, converted on the CPU: round to nearest even, infinities and NaN kept (any NaN
/// becomes a quiet one). No branches that depend on data, so that loops over them vectorise.
namespace fsdpp::kernels::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40U;
  return {static_cast<uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded)};
}

inline float to_float(Half x) {
  constexpr uint32_t kRebias = 112U << 23;  // exponent bias 127 - 15
  const uint32_t magnitude = (x.bits & 0x7fffU) << 13;
  const uint32_t sign = (x.bits & 0x8000U) << 16;
  const uint32_t normal = magnitude + kRebias;
  const uint32_t special = normal + kRebias;                                                 // infinity and NaN
  const uint32_t subnormal = bits_of(float_of(normal + (1U << 23)) - float_of(113U << 23));  // 2^-14 · (1 + m) - 2^-14
  const uint32_t exponent = magnitude & (0x1fU << 23);
  const uint32_t finite = exponent == 0 ? subnormal : normal;
  return float_of(sign | (exponent == (0x1fU << 23) ? special : finite));
}

inline Half to_half(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t normal = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);  // one ulp of 0.5 is the least half
  uint32_t half = magnitude < 0x38800000U ? subnormal : normal;                    // below 2^-14
  half = magnitude >= 0x477ff000U ? 0x7c00U : half;                                // from 65520 on: infinity
  half = magnitude > 0x7f800000U ? 0x7e00U : half;
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace fsdpp::kernels::cpu

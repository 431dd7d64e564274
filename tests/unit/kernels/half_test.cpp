#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/cpu/half.h"

namespace fsdpp::kernels::cpu {
namespace {

template <class Ours, class Theirs>
void expect_same_decoding() {
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const float ours = to_float(Ours{bits});
    const auto theirs = static_cast<float>(Theirs(bits, Theirs::from_bits()));
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(ours)) << pattern;
    } else {
      ASSERT_EQ(bits_of(ours), bits_of(theirs)) << pattern;
    }
  }
}

TEST(Half, EveryPatternDecodesAsInLibTorch) { expect_same_decoding<Half, c10::Half>(); }
TEST(BFloat16, EveryPatternDecodesAsInLibTorch) { expect_same_decoding<BFloat16, c10::BFloat16>(); }

Half encode(float x, Half*) { return to_half(x); }
BFloat16 encode(float x, BFloat16*) { return to_bfloat16(x); }

template <class Ours, class Theirs>
void expect_same_encoding(float x) {
  const uint16_t ours = encode(x, static_cast<Ours*>(nullptr)).bits;
  if (std::isnan(x)) {
    ASSERT_TRUE(std::isnan(to_float(Ours{ours}))) << bits_of(x);
  } else {
    ASSERT_EQ(ours, Theirs(x).x) << bits_of(x);
  }
}

/// Each 16-bit number, the middle between it and the next, and the neighbours of that middle; then random bits.
template <class Ours, class Theirs>
void expect_same_rounding() {
  for (uint32_t pattern = 0; pattern < 65535; ++pattern) {
    const float low = to_float(Ours{static_cast<uint16_t>(pattern)});
    const float high = to_float(Ours{static_cast<uint16_t>(pattern + 1)});
    const float middle = low + (high - low) / 2;
    for (const float x : {low, middle, std::nextafterf(middle, low), std::nextafterf(middle, high)}) {
      ASSERT_NO_FATAL_FAILURE((expect_same_encoding<Ours, Theirs>(x)));
    }
  }
  std::mt19937 random(1);
  for (int k = 0; k < 1000000; ++k) ASSERT_NO_FATAL_FAILURE((expect_same_encoding<Ours, Theirs>(float_of(random()))));
}

TEST(Half, RoundsToNearestEvenAsLibTorch) { expect_same_rounding<Half, c10::Half>(); }
TEST(BFloat16, RoundsToNearestEvenAsLibTorch) { expect_same_rounding<BFloat16, c10::BFloat16>(); }

TEST(Half, EveryPatternRoundTrips) {
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    if (!std::isnan(to_float(Half{bits}))) {
      ASSERT_EQ(to_half(to_float(Half{bits})).bits, bits);
    }
    if (!std::isnan(to_float(BFloat16{bits}))) {
      ASSERT_EQ(to_bfloat16(to_float(BFloat16{bits})).bits, bits);
    }
  }
}

TEST(Half, AtTheLimitsGivesExactBits) {
  EXPECT_EQ(to_half(65504.0F).bits, 0x7bff);
  EXPECT_EQ(to_half(65519.996F).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_half(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(to_half(-0.0F).bits, 0x8000);
  EXPECT_EQ(to_half(5.9604645e-8F).bits, 1);  // the least subnormal
  EXPECT_EQ(to_half(2.9802322e-8F).bits, 0);  // half of it: a tie, to even
  EXPECT_EQ(to_bfloat16(3.4028235e38F).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(1.00390625F).bits, 0x3f80);  // 1 + 2^-8: a tie, to even
}

}  // namespace
}  // namespace fsdpp::kernels::cpu

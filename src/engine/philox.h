#pragma once
#include <array>
#include <cstdint>
#include <span>

namespace fsdpp::engine {

/// [Note: Random numbers] Initial weights come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), a function of counter and
/// key: key = seed, counter = (element / 4, stream); the word element % 4 belongs to the element. So a value depends on
/// (seed, stream, element) alone, and every layout gives the same bits. Logarithm, sine and cosine of Box-Muller are polynomials in
/// double made of + · / and sqrt, which IEEE 754 rounds in one way, not the C library's.

/// One block of the generator: 4 words of a 128-bit counter and a 64-bit key (low words first).
[[nodiscard]] std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) noexcept;

/// out[i] = low + (high − low) · u of element first + i, u a multiple of 2⁻²⁴ in [0, 1).
void uniform_numbers(uint64_t seed, uint64_t stream, int64_t first, std::span<double> out, double low, double high) noexcept;
/// out[i] = mean + deviation · z of element first + i, z normal, |z| < 6.67.
void normal_numbers(uint64_t seed, uint64_t stream, int64_t first, std::span<double> out, double mean, double deviation) noexcept;

}  // namespace fsdpp::engine

#include "engine/philox.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

namespace fsdpp::engine {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;
constexpr size_t kCounters = 256;  // worked on side by side

// Words of consecutive counters, word w of counter i at [w][i].
using Words = std::array<std::array<uint32_t, kCounters>, 4>;

template <size_t N>
void round_once(std::array<std::array<uint32_t, N>, 4>& c, uint32_t key0, uint32_t key1) noexcept {
  for (size_t i = 0; i < N; ++i) {
    const uint64_t p0 = uint64_t{kMultiplier0} * c[0][i], p1 = uint64_t{kMultiplier1} * c[2][i];
    c[0][i] = static_cast<uint32_t>(p1 >> 32) ^ c[1][i] ^ key0;
    c[1][i] = static_cast<uint32_t>(p1);
    c[2][i] = static_cast<uint32_t>(p0 >> 32) ^ c[3][i] ^ key1;
    c[3][i] = static_cast<uint32_t>(p0);
  }
}

template <size_t N>
void all_rounds(std::array<std::array<uint32_t, N>, 4>& c, uint32_t key0, uint32_t key1) noexcept {
  for (int round = 0; round < kRounds; ++round, key0 += kWeyl0, key1 += kWeyl1) round_once(c, key0, key1);
}

void generate(uint64_t seed, uint64_t stream, uint64_t first_counter, Words& c) noexcept {
  for (size_t i = 0; i < kCounters; ++i) {
    const uint64_t counter = first_counter + i;
    c[0][i] = static_cast<uint32_t>(counter);
    c[1][i] = static_cast<uint32_t>(counter >> 32);
    c[2][i] = static_cast<uint32_t>(stream);
    c[3][i] = static_cast<uint32_t>(stream >> 32);
  }
  all_rounds(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// Polynomials in t, highest power first.
template <size_t N>
constexpr double horner(const std::array<double, N>& coefficients, double t) noexcept {
  double sum = coefficients[0];
  for (size_t i = 1; i < N; ++i) sum = sum * t + coefficients[i];
  return sum;
}

constexpr std::array<double, 12> kAtanh = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                           1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};

// Terms of the Taylor series in x² of sin(x) / x (odd = 1) and cos(x) (odd = 0).
constexpr std::array<double, 9> taylor(int odd) {
  std::array<double, 9> terms{};
  double term = 1.0;
  for (int i = 0; i < 9; ++i) {
    terms[static_cast<size_t>(8 - i)] = term;
    term = -term / ((2 * i + 1 + odd) * (2 * i + 2 + odd));
  }
  return terms;
}
constexpr auto kSin = taylor(1), kCos = taylor(0);

// Natural logarithm of a positive normal number: exponent · ln 2 + 2 · atanh((m − 1) / (m + 1)), m in [√½, √2).
inline double logarithm(double x) noexcept {
  constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1, kOne = uint64_t{1023} << 52;
  constexpr double kLn2 = 0.693147180559945309417, kSqrt2 = 1.41421356237309504880;
  // 2⁵² + biased exponent, as a double whose bits are at hand
  constexpr uint64_t kTwo52 = uint64_t{1075} << 52;
  const auto bits = std::bit_cast<uint64_t>(x);
  const double m = std::bit_cast<double>((bits & kMantissa) | kOne);
  const double exponent = std::bit_cast<double>((bits >> 52) | kTwo52) - (0x1p52 + 1023.0);
  const double upper = m > kSqrt2 ? 1.0 : 0.0;
  const double scaled = m - upper * (m * 0.5), power = exponent + upper;
  const double s = (scaled - 1.0) / (scaled + 1.0);
  return power * kLn2 + 2.0 * s * horner(kAtanh, s * s);
}

// Cosine and sine of 2π · turns, turns in [0, 1): the nearest quarter and what remains, within ±π/4.
inline void cos_sin(double turns, double& cos, double& sin) noexcept {
  constexpr double kHalfPi = 1.57079632679489661923, kToInteger = 0x1p52;
  const double quarters = turns * 4.0;
  const double shifted = quarters + kToInteger;  // rounds to the nearest integer
  const auto quarter = std::bit_cast<uint64_t>(shifted);
  const double x = (quarters - (shifted - kToInteger)) * kHalfPi, t = x * x;
  const auto s = std::bit_cast<uint64_t>(x * horner(kSin, t)), c = std::bit_cast<uint64_t>(horner(kCos, t));
  const uint64_t swapped = 0 - (quarter & 1);
  cos = std::bit_cast<double>(((c & ~swapped) | (s & swapped)) ^ (((quarter + 1) & 2) << 62));
  sin = std::bit_cast<double>(((s & ~swapped) | (c & swapped)) ^ ((quarter & 2) << 62));
}

// A word as a double, by bits: vector units convert signed integers only.
inline double as_double(uint32_t word) noexcept {
  return std::bit_cast<double>(word | std::bit_cast<uint64_t>(0x1p52)) - 0x1p52;
}

// Generates the counters that cover the elements, 256 at a time; keeps the numbers asked for.
template <class ToDoubles>
void each_block(uint64_t seed, uint64_t stream, int64_t first, std::span<double> out, ToDoubles&& to_doubles) noexcept {
  Words words;
  std::array<double, 4 * kCounters> numbers;
  size_t done = 0;
  while (done < out.size()) {
    const uint64_t element = static_cast<uint64_t>(first) + done;
    generate(seed, stream, element / 4, words);
    to_doubles(words, numbers);
    const size_t skip = element % 4, count = std::min(out.size() - done, numbers.size() - skip);
    std::copy_n(numbers.begin() + static_cast<std::ptrdiff_t>(skip), count, out.begin() + static_cast<std::ptrdiff_t>(done));
    done += count;
  }
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) noexcept {
  std::array<std::array<uint32_t, 1>, 4> c;
  for (size_t w = 0; w < 4; ++w) c[w][0] = counter[w];
  all_rounds(c, key[0], key[1]);
  return {c[0][0], c[1][0], c[2][0], c[3][0]};
}

void uniform_numbers(uint64_t seed, uint64_t stream, int64_t first, std::span<double> out, double low, double high) noexcept {
  const double width = high - low;
  each_block(seed, stream, first, out, [=](const Words& words, auto& numbers) {
    for (size_t w = 0; w < 4; ++w)
      for (size_t i = 0; i < kCounters; ++i)
        numbers[4 * i + w] = low + width * (as_double(words[w][i] >> 8) * 0x1p-24);
  });
}

void normal_numbers(uint64_t seed, uint64_t stream, int64_t first, std::span<double> out, double mean, double deviation) noexcept {
  each_block(seed, stream, first, out, [=](const Words& words, auto& numbers) {
    std::array<double, kCounters> radius, cosine, sine;
    for (size_t pair = 0; pair < 4; pair += 2) {
      for (size_t i = 0; i < kCounters; ++i) radius[i] = std::sqrt(-2.0 * logarithm((as_double(words[pair][i]) + 1.0) * 0x1p-32));
      for (size_t i = 0; i < kCounters; ++i) cos_sin(as_double(words[pair + 1][i]) * 0x1p-32, cosine[i], sine[i]);
      for (size_t i = 0; i < kCounters; ++i) {
        numbers[4 * i + pair] = mean + deviation * (radius[i] * cosine[i]);
        numbers[4 * i + pair + 1] = mean + deviation * (radius[i] * sine[i]);
      }
    }
  });
}

}  // namespace fsdpp::engine

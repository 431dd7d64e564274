// The generator of initial weights: known answers, and numbers that depend on the element alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "engine/philox.h"

namespace fsdpp::test {
namespace {

TEST(Philox, GivesTheKnownAnswersOfRandom123) {
  using Counter = std::array<uint32_t, 4>;
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(engine::philox4x32({0, 0, 0, 0}, {0, 0}), (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(engine::philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}), (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(engine::philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, NumbersDependOnTheElementAlone) {
  std::vector<double> all(5000);
  for (bool normal : {false, true}) {
    auto draw = [&](int64_t first, std::span<double> out) {
      normal ? engine::normal_numbers(7, 8, first, out, 1, 2) : engine::uniform_numbers(7, 8, first, out, -1, 2);
    };
    draw(0, all);
    for (auto [first, count] : {std::pair<size_t, size_t>{0, 1}, {1, 1}, {3, 2}, {1023, 4}, {1022, 1030}, {4999, 1}, {17, 4983}}) {
      std::vector<double> some(count);
      draw(static_cast<int64_t>(first), some);
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + static_cast<std::ptrdiff_t>(first))) << first << " " << count;
    }
  }
}

TEST(Philox, NumbersBeyondTheFirst32BitsOfTheCounterDiffer) {
  std::array<double, 8> low, high, stream, seed;
  const int64_t far = (int64_t{1} << 36) * 3;
  engine::uniform_numbers(1, 2, 0, low, 0, 1);
  engine::uniform_numbers(1, 2, far, high, 0, 1);
  engine::uniform_numbers(1, 2 + (uint64_t{1} << 32), 0, stream, 0, 1);
  engine::uniform_numbers(1 + (uint64_t{1} << 32), 2, 0, seed, 0, 1);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_NE(low[i], high[i]);
    EXPECT_NE(low[i], stream[i]);
    EXPECT_NE(low[i], seed[i]);
  }
}

TEST(Philox, NormalNumbersAreBoxMullerOfTheWords) {
  double worst = 0;
  for (uint32_t counter = 0; counter < 3000; ++counter) {
    const auto words = engine::philox4x32({counter, 0, 2, 0}, {1, 0});
    std::array<double, 4> got;
    engine::normal_numbers(1, 2, int64_t{counter} * 4, got, 0, 1);
    for (size_t pair = 0; pair < 4; pair += 2) {
      const double radius = std::sqrt(-2 * std::log((words[pair] + 1.0) * 0x1p-32));
      const double angle = 2 * std::numbers::pi * (words[pair + 1] * 0x1p-32);
      worst = std::max({worst, std::abs(got[pair] - radius * std::cos(angle)), std::abs(got[pair + 1] - radius * std::sin(angle))});
    }
  }
  EXPECT_LT(worst, 1e-14);
}

TEST(Philox, MomentsAreThoseOfTheDistributions) {
  std::vector<double> x(1 << 20);
  auto moment = [&](int k) {
    double sum = 0;
    for (double v : x) sum += std::pow(v, k);
    return sum / static_cast<double>(x.size());
  };
  engine::normal_numbers(3, 4, 0, x, 0, 1);
  EXPECT_NEAR(moment(1), 0, 5e-3);
  EXPECT_NEAR(moment(2), 1, 5e-3);
  EXPECT_NEAR(moment(3), 0, 2e-2);
  EXPECT_NEAR(moment(4), 3, 5e-2);
  engine::uniform_numbers(3, 4, 0, x, -1, 1);
  EXPECT_NEAR(moment(1), 0, 5e-3);
  EXPECT_NEAR(moment(2), 1 / 3.0, 5e-3);
  EXPECT_NEAR(moment(4), 1 / 5.0, 5e-3);
  EXPECT_GE(*std::min_element(x.begin(), x.end()), -1);
  EXPECT_LT(*std::max_element(x.begin(), x.end()), 1);
}

}  // namespace
}  // namespace fsdpp::test

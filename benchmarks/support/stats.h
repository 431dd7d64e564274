#pragma once
// Medians and spreads of measured samples.
#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

namespace bench {

struct Spread {
  double median = 0, min = 0, max = 0;
  size_t count = 0;
};

/// Throws std::invalid_argument for no samples. The median of an even number is the mean of the two in the middle.
[[nodiscard]] inline Spread spread_of(std::vector<double> samples) {
  if (samples.empty()) throw std::invalid_argument("spread_of: expected at least one sample, got none");
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  const double median = samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median, samples.front(), samples.back(), samples.size()};
}

}  // namespace bench

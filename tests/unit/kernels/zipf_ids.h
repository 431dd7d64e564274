#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace fsdpp::kernels {

/// Ids in [0, vocab) of which k comes up about in proportion to 1 / (k + 1), as words do.
inline std::vector<int64_t> zipf_ids(int64_t tokens, int64_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<int64_t> ids(static_cast<size_t>(tokens));
  for (auto& id : ids)
    id = std::min(static_cast<int64_t>(std::pow(static_cast<double>(vocab) + 1, uniform(random))) - 1, vocab - 1);
  return ids;
}

}  // namespace fsdpp::kernels

#pragma once
#include <string>

namespace fsdpp::engine {

/// The first line in which two texts differ, "nothing" standing for a line that one of them lacks.
struct Difference {
  int line = 0;  ///< from 0
  std::string left, right;
};
[[nodiscard]] Difference first_difference(const std::string& left, const std::string& right);

}  // namespace fsdpp::engine

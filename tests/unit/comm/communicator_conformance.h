#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/world.h"

/// What every back end must do. Each check is collective: all ranks of a world run it together. Expectations are
/// GoogleTest's and may come from any thread.
namespace fsdpp::test {

struct ConformanceCheck {
  std::string name;
  std::function<void(comm::World&)> run;
};

/// Checks for all back ends.
[[nodiscard]] std::vector<ConformanceCheck> conformance_checks();
/// Checks of the arithmetic that only the CPU back ends promise.
[[nodiscard]] std::vector<ConformanceCheck> cpu_conformance_checks();

}  // namespace fsdpp::test

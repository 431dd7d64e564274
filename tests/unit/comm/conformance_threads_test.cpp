// The conformance suite on the two back ends that can have all ranks in one process.
#include <gtest/gtest.h>

#include <tuple>

#include "support/host_world.h"
#include "unit/comm/communicator_conformance.h"

namespace fsdpp::test {
namespace {

using Case = std::tuple<ConformanceCheck, int>;

std::vector<ConformanceCheck> all_checks() {
  auto checks = conformance_checks();
  for (auto& check : cpu_conformance_checks()) checks.push_back(std::move(check));
  return checks;
}

std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return std::get<0>(info.param).name + "_" + std::to_string(std::get<1>(info.param)) + "Ranks";
}

class LocalConformance : public testing::TestWithParam<Case> {};
TEST_P(LocalConformance, Holds) {
  const auto& [check, size] = GetParam();
  comm::run_local_world(size, [&check = check](const std::shared_ptr<comm::World>& world) { check.run(*world); });
}

class HostConformance : public testing::TestWithParam<Case> {};
TEST_P(HostConformance, Holds) {
  const auto& [check, size] = GetParam();
  run_host_world(size, [&check = check](const std::shared_ptr<comm::World>& world) { check.run(*world); });
}

const auto kCases = testing::Combine(testing::ValuesIn(all_checks()), testing::Values(1, 2, 3, 4));
INSTANTIATE_TEST_SUITE_P(InProcess, LocalConformance, kCases, name_of_case);
INSTANTIATE_TEST_SUITE_P(Sockets, HostConformance, kCases, name_of_case);

}  // namespace
}  // namespace fsdpp::test

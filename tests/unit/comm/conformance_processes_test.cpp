// The conformance suite with one process for each rank: host communicators, or with FSDPP_TEST_DEVICE=cuda NCCL.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "support/world_size.h"
#include "unit/comm/communicator_conformance.h"

namespace fsdpp::test {
namespace {

bool on_cuda() {
  const char* device = std::getenv("FSDPP_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

std::shared_ptr<comm::World> the_world;

/// Makes the world before the first test; a world that can't be made (no GPU, say) fails the program.
class WorldEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    comm::WorldOptions options;
    options.device = on_cuda() ? c10::kCUDA : c10::kCPU;
    options.rendezvous_timeout = std::chrono::seconds(60);
    options.collective_timeout = std::chrono::seconds(60);
    the_world = comm::World::init(options);
    expect_started_world_size(*the_world);
    ASSERT_EQ(the_world->device().is_cuda(), on_cuda());
  }
  void TearDown() override { the_world.reset(); }
};
[[maybe_unused]] const auto* const kEnvironment = testing::AddGlobalTestEnvironment(new WorldEnvironment);

std::vector<ConformanceCheck> checks() {
  auto result = conformance_checks();
  if (!on_cuda())
    for (auto& check : cpu_conformance_checks()) result.push_back(std::move(check));
  return result;
}

class ProcessConformance : public testing::TestWithParam<ConformanceCheck> {};
TEST_P(ProcessConformance, Holds) { GetParam().run(*the_world); }
INSTANTIATE_TEST_SUITE_P(Processes, ProcessConformance, testing::ValuesIn(checks()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdpp::test

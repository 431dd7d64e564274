// Wires of a simulated network on a device: loads of streams and of graph replays.
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>

#include "fsdpp/comm/simulated_world.h"
#include "fsdpp/cuda/graph.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::test {
namespace {

using comm::SimulatedWorld;
using Clock = std::chrono::steady_clock;
constexpr double kDelay = 20e-3;

struct Rig {
  std::shared_ptr<SimulatedWorld> world;
  at::Tensor in = at::zeros({1}, c10::kCUDA), out = at::zeros({2}, c10::kCUDA);
  Rig() {
    const comm::FabricLink slow{.bytes_per_s = 1e15, .latency_s = kDelay};
    world = SimulatedWorld::make(
        {.ranks = 4, .ranks_per_node = 2, .within = slow, .between = slow, .tree_below = 0, .device = c10::kCUDA});
  }
  void gather(comm::Communicator& comm, cuda::StreamView stream) const {
    comm.all_gather({out.data_ptr(), 2, c10::kFloat}, {in.data_ptr(), 1, c10::kFloat}, stream, {"gather", {}})
        .wait(stream);
  }
};

template <class F>
double milliseconds_of(F work, std::initializer_list<cuda::StreamView> streams) {
  const auto start = Clock::now();
  work();
  for (auto s : streams) s.synchronize();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

TEST(SimulatedWorldOnDevice, LoadsOfOneWireThenOneAfterTheOtherOnAnyStreams) {
  const Rig rig;
  const auto a = rig.world->make_communicator("a", {0, 1}), b = rig.world->make_communicator("b", {0, 1}),
             c = rig.world->make_communicator("c", {0, 2});
  const cuda::Stream one(rig.world->device()), two(rig.world->device());
  const auto both = [&](comm::Communicator& second) {
    return milliseconds_of([&] { rig.gather(*a, one.view()), rig.gather(second, two.view()); },
                           {one.view(), two.view()});
  };
  (void)both(*b);
  EXPECT_GE(both(*b), 2e3 * kDelay);
  EXPECT_LT(both(*c), 2e3 * kDelay) << "another wire";
}

TEST(SimulatedWorldOnDevice, ReplaysThenDelayedAndCountedUnlessDelaysAreOff) {
  const Rig rig;
  const auto a = rig.world->make_communicator("a", {0, 1});
  const auto stream = cuda::current_stream(rig.world->device());
  cuda::Graph graph(rig.world->device());
  graph.capture([&] { rig.gather(*a, cuda::current_stream(rig.world->device())); });
  rig.world->reset_use();
  const auto replays = [&](int count) {
    return milliseconds_of(
        [&] {
          for (int i = 0; i < count; ++i) graph.replay();
        },
        {stream});
  };
  EXPECT_GE(replays(3), 3e3 * kDelay);
  rig.world->set_delays(false);
  EXPECT_LT(replays(2), 1e3 * kDelay);
  rig.world->set_delays(true);
  EXPECT_GE(replays(1), 1e3 * kDelay);
  const auto use = rig.world->use().at("a");
  EXPECT_EQ(use.operations, 6);
  EXPECT_EQ(use.bytes, 6 * 8);
  EXPECT_NEAR(use.seconds, 6 * kDelay, 6e-9);
  rig.world->reset_use();
  EXPECT_EQ(rig.world->use().at("a").operations, 0);
}

}  // namespace
}  // namespace fsdpp::test

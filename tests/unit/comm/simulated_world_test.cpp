#include "fsdpp/comm/simulated_world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "fsdpp/optim/adamw.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::FabricLink;
using comm::FabricRing;
using comm::SimulatedOptions;
using comm::SimulatedWorld;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

constexpr FabricLink kWithin{.bytes_per_s = 100e9, .latency_s = 2e-6},
    kBetween{.bytes_per_s = 10e9, .latency_s = 30e-6};

TEST(FabricRing, OneNodeThenStepsAndBytesByHand) {
  const FabricRing ring{.ranks = 8, .adapters = 8, .within = kWithin, .between = kBetween, .tree_below = 1000};
  EXPECT_DOUBLE_EQ(ring.gather(800'000'000), 7 * 2e-6 + 0.7e9 / 100e9);  // 14 µs + 7 ms
  EXPECT_DOUBLE_EQ(ring.all_reduce(800'000'000), 2 * (7 * 2e-6 + 0.7e9 / 100e9));
  EXPECT_DOUBLE_EQ(ring.broadcast(800'000'000), 3 * 2e-6 + 8e-3);
}

TEST(FabricRing, SeveralNodesThenTheirAdaptersSideBySide) {
  FabricRing ring{.ranks = 64, .nodes = 8, .adapters = 8, .within = kWithin, .between = kBetween, .tree_below = 1000};
  const double hops = 7 * 30e-6 + 56 * 2e-6;
  EXPECT_DOUBLE_EQ(ring.gather(6'400'000'000), hops + 6.3e9 / 80e9);
  ring.adapters = 1;
  EXPECT_DOUBLE_EQ(ring.gather(6'400'000'000), hops + 6.3e9 / 10e9);
  ring.adapters = 20;
  EXPECT_DOUBLE_EQ(ring.gather(6'400'000'000), hops + 6.3e9 / 100e9) << "the links within a node are the slower ones";
}

TEST(FabricRing, ManyNodesThenHopsOfBothKinds) {
  const FabricRing all{.ranks = 1024, .nodes = 128, .adapters = 8, .within = kWithin, .between = kBetween};
  EXPECT_DOUBLE_EQ(all.gather(1 << 20), 127 * 30e-6 + 896 * 2e-6 + (1 << 20) * 1023.0 / 1024 / 80e9);
  const FabricRing one_of_each{.ranks = 128, .nodes = 128, .adapters = 1, .within = kWithin, .between = kBetween};
  EXPECT_DOUBLE_EQ(one_of_each.gather(1 << 20), 127 * 30e-6 + (1 << 20) * 127.0 / 128 / 10e9);
}

TEST(FabricRing, AllReduceOfManyNodesThenTwoTrees) {
  const FabricRing replicas{.ranks = 128, .nodes = 128, .adapters = 1, .within = kWithin, .between = kBetween};
  EXPECT_DOUBLE_EQ(replicas.all_reduce(1 << 20), 2 * (7 * 30e-6 + (1 << 20) / 10e9));
  EXPECT_LT(replicas.all_reduce(1 << 20), 2 * replicas.gather(1 << 20));
}

TEST(FabricRing, SmallBufferThenTree) {
  const FabricRing ring{
      .ranks = 1024, .nodes = 128, .adapters = 8, .within = kWithin, .between = kBetween, .tree_below = 1000};
  EXPECT_DOUBLE_EQ(ring.gather(999), 7 * 30e-6 + 3 * 2e-6 + 999 * 1023.0 / 1024 / 80e9);
  EXPECT_GT(ring.gather(1000), 127 * 30e-6);
  const FabricRing five{.ranks = 5, .within = kWithin, .between = kBetween, .tree_below = 1000};
  EXPECT_DOUBLE_EQ(five.gather(999), 3 * 2e-6 + 999 * 0.8 / 100e9);
}

TEST(FabricRing, OneRankThenNoTime) {
  const FabricRing ring;
  EXPECT_EQ(ring.gather(1 << 20), 0);
  EXPECT_EQ(ring.all_reduce(1 << 20), 0);
  EXPECT_EQ(ring.broadcast(1 << 20), 0);
}

std::vector<float> counted(size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}
comm::Buffer buffer_of(std::vector<float>& v) { return {v.data(), static_cast<int64_t>(v.size()), c10::kFloat}; }

TEST(SimulatedWorld, GatherThenCopiesOfTheOwnPart) {
  const auto comm = SimulatedWorld::make({.ranks = 5})->make_communicator("c");
  auto in = counted(3);
  std::vector<float> out(15);
  comm->all_gather(buffer_of(out), buffer_of(in), {}).wait_host();
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(out[i], in[i % 3]);
  EXPECT_THROW((void)comm->all_gather(buffer_of(in), buffer_of(out), {}), UsageError);  // sizes are checked as on a real network
}

TEST(SimulatedWorld, GatherInPlaceThenCopiesOfTheOwnPart) {
  const auto comm = SimulatedWorld::make({.ranks = 3})->make_communicator("c");
  auto all = counted(6);
  comm->all_gather(buffer_of(all), {all.data(), 2, c10::kFloat}, {}).wait_host();
  EXPECT_THAT(all, testing::ElementsAre(1, 2, 1, 2, 1, 2));
}

TEST(SimulatedWorld, ReductionsThenTheOwnPart) {
  const auto comm = SimulatedWorld::make({.ranks = 4})->make_communicator("c");
  auto in = counted(8);
  std::vector<float> part(2), all(8);
  comm->reduce_scatter(buffer_of(part), buffer_of(in), comm::ReduceOp::Sum, {}).wait_host();
  EXPECT_THAT(part, testing::ElementsAre(1, 2));
  comm->all_reduce(buffer_of(all), buffer_of(in), comm::ReduceOp::Sum, {}).wait_host();
  EXPECT_EQ(all, in);
}

TEST(SimulatedWorld, OperationsOfOneCommunicatorThenTheirDelaysAddUp) {
  const auto world =
      SimulatedWorld::make({.ranks = 4, .within = {.bytes_per_s = 1e12, .latency_s = 5e-3}, .tree_below = 0});
  const auto comm = world->make_communicator("c");
  auto in = counted(1);
  std::vector<float> out(4);
  const auto start = Clock::now();
  std::vector<comm::Ticket> tickets;
  for (int i = 0; i < 3; ++i) tickets.push_back(comm->all_gather(buffer_of(out), buffer_of(in), {}));
  EXPECT_FALSE(tickets[2].query());
  tickets[0].wait_host();
  EXPECT_GE(milliseconds_since(start), 15);
  tickets[2].wait_host();
  EXPECT_GE(milliseconds_since(start), 45);
  const auto use = world->use().at("c");
  EXPECT_EQ(use.operations, 3);
  EXPECT_EQ(use.bytes, 3 * 16);
  EXPECT_DOUBLE_EQ(use.seconds, 3 * (3 * 5e-3 + 12 / 1e12));
}

TEST(SimulatedWorld, DelaysOffThenTicketsAreCompleteAndTheModelStillCounts) {
  const auto world = SimulatedWorld::make({.ranks = 4, .within = {.latency_s = 10}});
  world->set_delays(false);
  auto in = counted(1);
  std::vector<float> out(4);
  EXPECT_TRUE(world->make_communicator("c")->all_gather(buffer_of(out), buffer_of(in), {}).query());
  EXPECT_GE(world->use().at("c").seconds, 20);
  world->reset_use();
  EXPECT_EQ(world->use().at("c").operations, 0);
}

TEST(SimulatedWorld, AbortedThenWaitersAreReleased) {
  const auto comm = SimulatedWorld::make({.ranks = 2, .within = {.latency_s = 100}})->make_communicator("c");
  auto in = counted(1);
  std::vector<float> out(2);
  const auto ticket = comm->all_gather(buffer_of(out), buffer_of(in), {});
  comm->abort("for the test");
  EXPECT_THROW(ticket.wait_host(), CommError);
}

TEST(SimulatedWorld, CommunicatorSpansNodesThenTheirLinksCount) {
  const auto world = SimulatedWorld::make({.ranks = 16, .ranks_per_node = 8});
  world->set_delays(false);
  auto in = counted(1 << 14);
  std::vector<float> out(in.size() * 8);
  (void)world->make_communicator("inside", {0, 1, 2, 3, 4, 5, 6, 7})->all_gather(buffer_of(out), buffer_of(in), {});
  (void)world->make_communicator("across", {0, 2, 4, 6, 8, 10, 12, 14})->all_gather(buffer_of(out), buffer_of(in), {});
  (void)world->make_communicator("all")->all_gather(buffer_of(out), {in.data(), 1 << 13, c10::kFloat}, {});
  (void)world->make_communicator("uneven", {0, 1, 8})
      ->all_reduce(buffer_of(in), buffer_of(in), comm::ReduceOp::Sum, {});
  const auto use = world->use();
  const double bytes = (1 << 14) * 8 * 4.0;
  EXPECT_DOUBLE_EQ(use.at("inside").seconds, 7 * 3.4e-6 + bytes * 7 / 8 / 370e9);
  EXPECT_DOUBLE_EQ(use.at("across").seconds, 14e-6 + 6 * 3.4e-6 + bytes * 7 / 8 / 200e9);
  EXPECT_DOUBLE_EQ(use.at("all").seconds, 14e-6 + 14 * 3.4e-6 + bytes * 15 / 16 / 370e9);
  EXPECT_DOUBLE_EQ(use.at("uneven").seconds, 2 * (14e-6 + 3.4e-6 + bytes / 8 * 2 / 3 / 50e9));
}

// Each 30 ms on its wire.
double milliseconds_of_two(const std::vector<int>& first, const std::vector<int>& second) {
  const FabricLink slow{.bytes_per_s = 1e12, .latency_s = 30e-3};
  const auto world =
      SimulatedWorld::make({.ranks = 4, .ranks_per_node = 2, .within = slow, .between = slow, .tree_below = 0});
  auto in = counted(1);
  std::vector<float> out(2);
  const auto a = world->make_communicator("a", first), b = world->make_communicator("b", second);
  const auto start = Clock::now();
  const auto one = a->all_gather(buffer_of(out), buffer_of(in), {}),
             two = b->all_gather(buffer_of(out), buffer_of(in), {});
  one.wait_host();
  two.wait_host();
  return milliseconds_since(start);
}

TEST(SimulatedWorld, TwoCommunicatorsOnOneWireThenOneAfterTheOther) {
  EXPECT_GE(milliseconds_of_two({0, 1}, {0, 1}), 60);
  EXPECT_GE(milliseconds_of_two({0, 2}, {0, 3}), 60);
  double apart = 1e9;
  for (int i = 0; i < 5; ++i) apart = std::min(apart, milliseconds_of_two({0, 1}, {0, 2}));
  EXPECT_LT(apart, 60) << "links within a node and between nodes are two wires";
}

TEST(SimulatedWorld, OptionsMakeNoSenseThenConfigError) {
  EXPECT_THROW((void)SimulatedWorld::make({.ranks = 0}), ConfigError);
  EXPECT_THROW((void)SimulatedWorld::make({.ranks = 2, .within = {.bytes_per_s = 0}}), ConfigError);
}

std::vector<UnitMemory> memory_of(const TinyNet& net) {
  std::vector<UnitMemory> all;
  for (const auto& unit : units(*net)) all.push_back(unit.memory());
  return all;
}

// Steps of AdamW; what went over the wire in the last of them.
std::map<std::string, comm::FabricUse> train(SimulatedWorld& world, TinyNet& net, int steps) {
  optim::AdamW adamw(*net);
  for (int i = 0; i < steps; ++i) {
    world.reset_use();
    adamw.zero_grad();
    const auto ids = tokens(1, 23);
    token_loss(net(ids), ids).backward();
    adamw.step();
  }
  return world.use();
}

class SimulatedTraining : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SimulatedTraining, testing::Values(8, 1024));

TEST_P(SimulatedTraining, StepThenBytesAreThePlans) {
  const auto world = SimulatedWorld::make({.ranks = GetParam()});
  auto net = make_tiny_net();
  shard_tiny_net(net, comm::Mesh::shard(world));
  const auto use = train(*world, net, 2);
  int64_t gathers = 0, reductions = 0, blocks = 0;
  for (const auto& m : memory_of(net)) {
    EXPECT_EQ(m.gathered_bytes, m.shard_bytes * GetParam());  // one dtype: rank 0's shard is its part of it
    EXPECT_EQ(m.gradient_bytes, m.gathered_bytes);
    gathers += m.gathered_bytes * (m.keeps_gathered ? 1 : 2);
    reductions += m.gradient_bytes;
    ++blocks;
  }
  EXPECT_EQ(blocks, 4);
  EXPECT_EQ(use.at("default.gather").operations, 3 * 2 + 1);  // a block's twice, the root's once
  EXPECT_EQ(use.at("default.gather").bytes, gathers);
  EXPECT_GE(use.at("default.reduce").bytes, reductions);  // and the few bytes that ranks compare
  EXPECT_LE(use.at("default.reduce").bytes, reductions + 256);
  EXPECT_LE(reserved_buffer_bytes(*net), memory_formula(*net).gathered + memory_formula(*net).gradients);
}

TEST(SimulatedTraining, RealRanksThenTheSameSizes) {
  constexpr int kRanks = 8;
  std::vector<UnitMemory> real;
  comm::run_local_world(kRanks, [&](std::shared_ptr<comm::World> world) {
    auto net = make_tiny_net();
    shard_tiny_net(net, comm::Mesh::shard(world));
    if (world->rank() == 0) real = memory_of(net);
  });
  auto net = make_tiny_net();
  shard_tiny_net(net, comm::Mesh::shard(SimulatedWorld::make({.ranks = kRanks})));
  const auto simulated = memory_of(net);
  ASSERT_EQ(simulated.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(simulated[i].shard_bytes, real[i].shard_bytes);
    EXPECT_EQ(simulated[i].gathered_bytes, real[i].gathered_bytes);
    EXPECT_EQ(simulated[i].gradient_bytes, real[i].gradient_bytes);
  }
}

TEST(SimulatedTraining, HybridMeshThenReplicasReduceAcrossNodes) {
  const auto world = SimulatedWorld::make({.ranks = 16, .ranks_per_node = 4});
  auto net = make_tiny_net();
  shard_tiny_net(net, comm::Mesh::hybrid(world, 4));
  const auto use = train(*world, net, 2);
  EXPECT_EQ(use.at("default.replicate").operations, 4 + 1);  // and what the ranks compare in each step
  int64_t slices = 0;
  for (const auto& m : memory_of(net)) slices += m.gradient_bytes / 4;
  EXPECT_GE(use.at("default.replicate").bytes, slices);
  EXPECT_LE(use.at("default.replicate").bytes, slices + 256);
}

}  // namespace
}  // namespace fsdpp::test

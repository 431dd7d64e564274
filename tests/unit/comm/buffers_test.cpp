// Memory that communicators hand out: agreement of the ranks, lifetime, and what decides whether it can be registered.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "comm/end_process.h"
#include "comm/window_support.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/buffers.h"
#include "fsdpp/comm/simulated_world.h"
#include "support/host_world.h"

namespace fsdpp::test {
namespace {

using comm::allocate_tensor;
using comm::run_local_world;
using comm::WindowBar;
using comm::WindowFacts;
using comm::World;
using testing::AllOf;
using testing::HasSubstr;
using testing::Optional;

using Body = std::function<void(std::shared_ptr<World>)>;
void on_threads_and_sockets(int size, const Body& body) {
  run_local_world(size, body);
  run_host_world(size, body);
}

std::string mismatch_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::Mismatch);
    return error.what();
  }
  return "no error";
}

TEST(Buffers, SizesDifferThenEveryRankIsToldAllOfThemAndCanGoOn) {
  on_threads_and_sockets(3, [](const std::shared_ptr<World>& world) {
    const auto comm = world->make_communicator("sizes");
    const auto said = mismatch_of([&] { (void)comm->allocate(world->rank() == 1 ? 8192 : 4096, {.label = "gathered"}); });
    EXPECT_THAT(said, AllOf(HasSubstr("'gathered'"), HasSubstr("'sizes'"), HasSubstr("4096 on ranks 0, 2"), HasSubstr("8192 on rank 1")));
    const auto memory = comm->allocate(512, {.label = "gathered"});
    EXPECT_NE(memory.data.get(), nullptr);
    EXPECT_EQ(std::tuple(memory.bytes, memory.registered), std::tuple(512, false));
  });
}

TEST(Buffers, OneRankAllocatesWhereAnotherReducesThenBothAreNamed) {
  on_threads_and_sockets(2, [](const std::shared_ptr<World>& world) {
    const auto comm = world->make_communicator("order");
    const auto value = at::full({4}, 1.0F);
    const auto said = mismatch_of([&] {
      if (world->rank() == 0) return (void)comm->allocate(64, {.label = "slot"});
      const comm::Buffer all{value.data_ptr(), 4};
      comm->all_reduce(all, all, comm::ReduceOp::Sum, {}, {.label = "layers.3"}).wait_host();
    });
    EXPECT_THAT(said, AllOf(HasSubstr("allocate slot"), HasSubstr("all_reduce"), HasSubstr("'layers.3'")));
  });
}

TEST(Buffers, CopyEnginesAreAskedForOnOneRankOnlyThenError) {
  run_local_world(2, [](const std::shared_ptr<World>& world) {
    const auto comm = world->make_communicator("engines", {}, {.copy_engine = world->rank() == 1});
    EXPECT_THAT(mismatch_of([&] { (void)comm->allocate(64); }),
                AllOf(HasSubstr("copy_engine"), HasSubstr("0 on rank 0"), HasSubstr("1 on rank 1")));
  });
}

TEST(Buffers, NothingOrTooMuchIsAskedForThenError) {
  run_local_world(2, [](const std::shared_ptr<World>& world) {
    const auto comm = world->make_communicator("sizes");
    EXPECT_THROW((void)comm->allocate(0), UsageError);
    try {
      (void)comm->allocate(int64_t{1} << 60, {.label = "huge"});
      ADD_FAILURE() << "an exabyte was found";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), CommErrc::Backend);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'huge'"), HasSubstr("rank 0, 1")));
    }
    {
      const comm::Group group(*comm);
      EXPECT_THROW((void)comm->allocate(64), UsageError) << "inside a group";
    }
    comm->barrier();
  });
}

TEST(Buffers, TensorIsTheLastToGoThenItsMemoryIsStillThere) {
  on_threads_and_sockets(2, [](const std::shared_ptr<World>& world) {
    at::Tensor view;
    {
      const auto comm = world->make_communicator("short");
      const auto whole = allocate_tensor(*comm, {2, 50}, at::kFloat);
      EXPECT_EQ(whole.sizes(), at::IntArrayRef({2, 50}));
      EXPECT_TRUE(whole.is_contiguous());
      EXPECT_EQ(whole.storage().nbytes(), 400);
      view = whole.select(0, world->rank());
      view.copy_(at::full({50}, 1.0F + static_cast<float>(world->rank())));
      const comm::Buffer out{whole.data_ptr(), 100};
      comm->all_gather(out, {view.data_ptr(), 50, at::kFloat}, {}).wait_host();
      EXPECT_TRUE(at::equal(whole.select(0, 1 - world->rank()), at::full({50}, 2.0F - static_cast<float>(world->rank()))));
    }
    EXPECT_TRUE(at::equal(view, at::full({50}, 1.0F + static_cast<float>(world->rank())))) << "after the communicator";
  });
}

TEST(Buffers, OneRankThenNobodyIsAsked) {
  std::atomic<int> operations = 0;
  comm::LocalWorldOptions options;
  options.on_operation = [&](const comm::OperationEvent&) {
    ++operations;
    return comm::Fault::None;
  };
  run_local_world(1, [](const std::shared_ptr<World>& world) { (void)world->make_communicator("alone")->allocate(64); }, options);
  EXPECT_EQ(operations, 0);
}

TEST(Buffers, SimulatedWorldThenPlainMemoryAndNoTraffic) {
  const auto world = comm::SimulatedWorld::make({.ranks = 64});
  const auto comm = world->make_communicator("simulated");
  EXPECT_NE(comm->allocate(4096).data.get(), nullptr);
  EXPECT_EQ(world->use().at("simulated").operations, 0);
}

TEST(BuffersDeathTest, NotRegisteredThenOneLineSaysWhy) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        run_local_world(2, [](const std::shared_ptr<World>& world) {
          for (const char* name : {"a", "b"}) {
            const auto comm = world->make_communicator(name);
            for (int i = 0; i < 3; ++i) (void)comm->allocate(64);
          }
        });
        std::exit(0);
      },
      testing::ExitedWithCode(0), testing::ResultOf([](const std::string& log) { return std::count(log.begin(), log.end(), '\n'); }, 1));
  EXPECT_EXIT(
      {
        comm::warn_plain_buffers("default.gather", "ranks 0 and 3 are on different hosts");
        std::exit(0);
      },
      testing::ExitedWithCode(0), "plain memory is used .*'default.gather'.*: ranks 0 and 3 are on different hosts");
}

TEST(EndProcessDeathTest, SaysWhyAndRunsNoDestructor) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  struct Hangs {
    ~Hangs() {
      for (;;) {
      }
    }
  };
  EXPECT_EXIT(
      {
        static const Hangs global;
        comm::end_process("communicator 'default.gather': rank 2 is dead");
      },
      testing::ExitedWithCode(1), "rank 2 is dead");
}

// Ranks 3, 5, 8 of one host, each with a GPU of its own, all within reach.
std::vector<WindowFacts> three_good() { return {{.host = 7, .gpu = 0x100}, {.host = 7, .gpu = 0x200}, {.host = 7, .gpu = 0x300}}; }
std::optional<std::string> refused(const std::vector<WindowFacts>& facts) { return comm::windows_refused(facts, {3, 5, 8}); }

TEST(WindowSupport, OneHostWithPeerAccessThenNotRefused) { EXPECT_EQ(refused(three_good()), std::nullopt); }

TEST(WindowSupport, AnythingIsMissingThenTheReasonNamesRanks) {
  auto facts = three_good();
  facts[2].host = 8;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("ranks 3 and 8 are on different hosts")));
  facts = three_good();
  facts[1].unreachable = 2;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("the GPU of rank 5 has no peer access to that of rank 8")));
  facts = three_good();
  facts[1].bar = WindowBar::WindowsOff;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("rank 5 has NCCL_WIN_ENABLE=0")));
  facts[1].bar = WindowBar::VirtualMemoryOff;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("rank 5 has NCCL_CUMEM_ENABLE=0")));
  facts[1].bar = WindowBar::OldDriver;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("rank 5 has a CUDA driver")));
  facts = three_good();
  facts[2].gpu = facts[0].gpu;
  EXPECT_THAT(refused(facts), Optional(HasSubstr("ranks 3 and 8 share a GPU")));
}

TEST(WindowSupport, EnvironmentForbidsThenBar) {
  EXPECT_EQ(comm::window_bar_of_environment(), WindowBar::None);
  ::setenv("NCCL_CUMEM_ENABLE", "0", 1);
  EXPECT_EQ(comm::window_bar_of_environment(), WindowBar::VirtualMemoryOff);
  ::setenv("NCCL_WIN_ENABLE", "0", 1);
  EXPECT_EQ(comm::window_bar_of_environment(), WindowBar::WindowsOff);
  ::unsetenv("NCCL_CUMEM_ENABLE");
  ::unsetenv("NCCL_WIN_ENABLE");
}

TEST(WindowSupport, HostIsThatOfNcclThenRanksOnOneGpuAreApart) {
  const auto host = comm::window_host();
  EXPECT_EQ(host, comm::window_host());
  ::setenv("NCCL_HOSTID", "rank0", 1);
  const auto first = comm::window_host();
  ::setenv("NCCL_HOSTID", "rank1", 1);
  EXPECT_NE(first, comm::window_host());
  EXPECT_NE(first, host);
  ::unsetenv("NCCL_HOSTID");
}

}  // namespace
}  // namespace fsdpp::test

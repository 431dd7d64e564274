// What goes wrong between ranks, and what each of them is told. In-process and host back ends, ranks as threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "support/host_world.h"

namespace fsdpp::test {
namespace {

using namespace std::chrono_literals;
using comm::ReduceOp;
using comm::World;
using testing::AllOf;
using testing::HasSubstr;
using WorldPtr = std::shared_ptr<World>;
using Body = std::function<void(const WorldPtr&, comm::Communicator&)>;

struct Told {
  CommErrc code;
  std::string text;
};
using AllTold = std::vector<std::optional<Told>>;

struct Backend {
  const char* name;
  void (*run)(int size, const std::function<void(WorldPtr)>& body, std::chrono::milliseconds timeout);
};

void run_local(int size, const std::function<void(WorldPtr)>& body, std::chrono::milliseconds timeout) {
  comm::LocalWorldOptions options;
  options.collective_timeout = timeout;
  comm::run_local_world(size, body, options);
}
void run_sockets(int size, const std::function<void(WorldPtr)>& body, std::chrono::milliseconds timeout) {
  HostWorldOptions options;
  options.collective_timeout = timeout;
  run_host_world(size, body, options);
}

/// What `body` threw as CommError on each rank. A communicator stays until every rank has its answer.
AllTold tell(const Backend& backend, int size, const Body& body, std::chrono::milliseconds timeout = 20s) {
  AllTold told(static_cast<size_t>(size));
  std::mutex mutex;
  backend.run(
      size,
      [&](const WorldPtr& world) {
        auto comm = world->make_communicator("faulty");
        try {
          body(world, *comm);
        } catch (const CommError& error) {
          std::lock_guard lock(mutex);
          told[static_cast<size_t>(world->rank())] = Told{error.code(), error.what()};
        }
        world->barrier();
      },
      timeout);
  return told;
}

class CommFault : public testing::TestWithParam<Backend> {};
INSTANTIATE_TEST_SUITE_P(Backends, CommFault,
                         testing::Values(Backend{"Local", run_local}, Backend{"Sockets", run_sockets}),
                         [](const auto& info) { return std::string(info.param.name); });

std::vector<float> floats(int64_t count) { return std::vector<float>(static_cast<size_t>(count), 1.0F); }
comm::Buffer whole(std::vector<float>& v) { return {v.data(), static_cast<int64_t>(v.size())}; }

void reduce(comm::Communicator& comm, int64_t count, ReduceOp op, const char* label,
            std::chrono::milliseconds timeout = 0ms) {
  auto data = floats(count);
  comm.all_reduce(whole(data), whole(data), op, {}, {.label = label, .timeout = timeout}).wait_host();
}

void expect_mismatch(const AllTold& told, const char* one, const char* other) {
  for (size_t r = 0; r < told.size(); ++r) {
    ASSERT_TRUE(told[r]) << "rank " << r << " was told nothing";
    EXPECT_EQ(told[r]->code, CommErrc::Mismatch) << told[r]->text;
    EXPECT_THAT(told[r]->text, AllOf(HasSubstr(one), HasSubstr(other), HasSubstr("'faulty'"), HasSubstr("rank 1")));
  }
}

TEST_P(CommFault, CountDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 3,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         w->rank() == 1 ? reduce(c, 7, ReduceOp::Sum, "second block")
                                        : reduce(c, 5, ReduceOp::Sum, "first block");
                       }),
                  "5 Float 'first block'", "7 Float 'second block'");
}

TEST_P(CommFault, LargeCountDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 3,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         reduce(c, w->rank() == 1 ? 3'000'000 : 2'000'000, ReduceOp::Sum, "big");
                       }),
                  "2000000 Float 'big'", "3000000 Float 'big'");
}

TEST_P(CommFault, ReduceOpDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 2,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         reduce(c, 5, w->rank() == 1 ? ReduceOp::Max : ReduceOp::Sum, "norm");
                       }),
                  "all_reduce(sum)", "all_reduce(max)");
}

TEST_P(CommFault, DtypeDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 2,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         auto data = floats(4);
                         const auto dtype = w->rank() == 1 ? c10::kInt : c10::kFloat;
                         c.broadcast({data.data(), 4, dtype}, 0, {}, {.label = "seed"}).wait_host();
                       }),
                  "4 Float 'seed'", "4 Int 'seed'");
}

TEST_P(CommFault, OperationDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 2,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         if (w->rank() == 1) return c.barrier({.label = "end of epoch"});
                         reduce(c, 5, ReduceOp::Sum, "loss");
                       }),
                  "all_reduce(sum) of 5 Float 'loss'", "barrier 'end of epoch'");
}

TEST_P(CommFault, LabelAloneDiffersThenMismatchNamesBothOnEveryRank) {
  expect_mismatch(tell(GetParam(), 2,
                       [](const WorldPtr& w, comm::Communicator& c) {
                         reduce(c, 5, ReduceOp::Sum, w->rank() == 1 ? "layers.1" : "layers.0");
                       }),
                  "'layers.0'", "'layers.1'");
}

TEST_P(CommFault, LabelMissingOnOneSideThenNoMismatch) {
  for (const auto& told : tell(GetParam(), 2, [](const WorldPtr&w, comm::Communicator&c) {
         reduce(c, 5, ReduceOp::Sum, w->rank() == 1 ? "" : "layers.0");
       }))
    EXPECT_FALSE(told) << told->text;
}

TEST_P(CommFault, RankNeverIssuesThenTimeoutNamesOperationAndRank) {
  const auto told = tell(GetParam(), 3, [](const WorldPtr& w, comm::Communicator& c) {
    reduce(c, 2, ReduceOp::Sum, "warm-up");
    if (w->rank() != 2) return reduce(c, 2, ReduceOp::Sum, "layers.7 backward", 100ms);
    std::this_thread::sleep_for(400ms);
  });
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(told[r]);
    EXPECT_EQ(told[r]->code, CommErrc::Timeout) << told[r]->text;
    EXPECT_THAT(told[r]->text, AllOf(HasSubstr("all_reduce #1 'layers.7 backward'"),
                                     HasSubstr("never issued by rank 2"), HasSubstr("0.1 s")));
  }
}

TEST_P(CommFault, OperationHasItsOwnTimeoutThenThatCounts) {
  const auto start = std::chrono::steady_clock::now();
  const auto told = tell(GetParam(), 2, [](const WorldPtr& w, comm::Communicator& c) {
    if (w->rank() == 0) c.barrier({.label = "short", .timeout = 50ms});
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  ASSERT_TRUE(told[0]);
  EXPECT_EQ(told[0]->code, CommErrc::Timeout);
}

TEST_P(CommFault, LateRankThenNoFailure) {
  for (const auto& told : tell(GetParam(), 2, [](const WorldPtr&w, comm::Communicator&c) {
         std::this_thread::sleep_for(w->rank() * 60ms);
         reduce(c, 100, ReduceOp::Sum, "late");
       }))
    EXPECT_FALSE(told) << told->text;
}

TEST_P(CommFault, AbortFromAnotherThreadThenWaiterIsReleasedAndPeersAreTold) {
  const auto start = std::chrono::steady_clock::now();
  const auto told = tell(GetParam(), 3, [](const WorldPtr& w, comm::Communicator& c) {
    if (w->rank() == 2) return std::this_thread::sleep_for(300ms);
    if (w->rank() == 1) return reduce(c, 4, ReduceOp::Sum, "waits");
    std::thread killer([&c] {
      std::this_thread::sleep_for(50ms);
      c.abort("user pressed the button");
    });
    try {
      reduce(c, 4, ReduceOp::Sum, "waits");
    } catch (...) {
      killer.join();
      throw;
    }
    killer.join();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(told[r]) << r;
    EXPECT_EQ(told[r]->code, CommErrc::Aborted) << told[r]->text;
    EXPECT_THAT(told[r]->text, HasSubstr("user pressed the button"));
  }
}

TEST_P(CommFault, UsedAfterFailureThenFirstFailureAgain) {
  tell(GetParam(), 2, [](const WorldPtr& w, comm::Communicator& c) {
    comm::Ticket ticket;
    auto data = floats(3);
    if (w->rank() == 0) ticket = c.broadcast(whole(data), 0, {}, {.label = "never answered", .timeout = 50ms});
    if (w->rank() == 1) return std::this_thread::sleep_for(300ms);
    std::string first;
    try {
      ticket.wait_host();
      ADD_FAILURE() << "nobody answered, but the wait returned";
    } catch (const CommError& error) {
      first = error.what();
    }
    for (int i = 0; i < 2; ++i) {
      try {
        c.barrier();
        ADD_FAILURE() << "a failed communicator took an operation";
      } catch (const CommError& error) {
        EXPECT_EQ(error.what(), first);
      }
    }
    EXPECT_THROW((void)ticket.query(), CommError);
  });
}

TEST_P(CommFault, PeerIsDestroyedThenRemoteDiedNamesIt) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> told(3);
  GetParam().run(
      3,
      [&](const WorldPtr& world) {
        auto comm = world->make_communicator("faulty");
        comm->barrier();
        if (world->rank() == 1) {
          comm.reset();
        } else {
          try {
            reduce(*comm, 4, ReduceOp::Sum, "after the end");
          } catch (const CommError& error) {
            EXPECT_EQ(error.code(), CommErrc::RemoteDied) << error.what();
            told[static_cast<size_t>(world->rank())] = error.what();
          }
        }
        world->barrier();
      },
      20s);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  for (size_t r : {0U, 2U})
    EXPECT_THAT(told[r], AllOf(HasSubstr("rank 1"), HasSubstr("ended"), HasSubstr("'after the end'")));
}

TEST_P(CommFault, OneCommunicatorFailsThenOthersStillWork) {
  GetParam().run(
      2,
      [](const WorldPtr& world) {
        auto bad = world->make_communicator("bad");
        auto good = world->make_communicator("good");
        bad->abort("only this one");
        EXPECT_THROW(bad->barrier(), CommError);
        reduce(*good, 10, ReduceOp::Sum, "fine");
      },
      20s);
}

// ---- injected faults: in-process only ----

comm::LocalWorldOptions inject(int rank, const std::string& label, comm::Fault fault,
                               std::chrono::milliseconds timeout = 20s) {
  comm::LocalWorldOptions options;
  options.collective_timeout = timeout;
  options.on_operation = [=](const comm::OperationEvent& event) {
    return event.rank == rank && event.label == label ? fault : comm::Fault::None;
  };
  return options;
}

AllTold tell_injected(const comm::LocalWorldOptions& options, const Body& body) {
  AllTold told(2);
  comm::run_local_world(
      2,
      [&](const WorldPtr& world) {
        auto comm = world->make_communicator("faulty");
        try {
          body(world, *comm);
        } catch (const CommError& error) {
          told[static_cast<size_t>(world->rank())] = Told{error.code(), error.what()};
        }
        world->barrier();
      },
      options);
  return told;
}

const Body kTwoReductions = [](const WorldPtr&, comm::Communicator& c) {
  reduce(c, 3, ReduceOp::Sum, "a");
  reduce(c, 3, ReduceOp::Sum, "b");
};

TEST(CommInjection, DropThenTimeoutOnEveryRankNamesWhoDropped) {
  for (const auto& told : tell_injected(inject(1, "b", comm::Fault::Drop, 100ms), kTwoReductions)) {
    ASSERT_TRUE(told);
    EXPECT_EQ(told->code, CommErrc::Timeout);
    EXPECT_THAT(told->text, AllOf(HasSubstr("#1"), HasSubstr("rank 1"), HasSubstr("last issued all_reduce #0 'a'")));
  }
}

TEST(CommInjection, MismatchThenEveryRankIsTold) {
  for (const auto& told : tell_injected(inject(0, "b", comm::Fault::Mismatch), kTwoReductions)) {
    ASSERT_TRUE(told);
    EXPECT_EQ(told->code, CommErrc::Mismatch);
    EXPECT_THAT(told->text, AllOf(HasSubstr("3 Float 'b'"), HasSubstr("4 Float 'b'")));
  }
}

TEST(CommInjection, ThrowThenThatRankThrowsAndItsWorldEnds) {
  const auto start = std::chrono::steady_clock::now();
  try {
    comm::run_local_world(
        3,
        [](const WorldPtr& world) {
          auto comm = world->make_communicator("faulty");
          kTwoReductions(world, *comm);
        },
        inject(2, "b", comm::Fault::Throw));
    FAIL() << "the injected failure was lost";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::Injected);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("[rank 2/3]"), HasSubstr("all_reduce #1 'b'")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(CommInjection, DelayThenResultsAreRightAndEventsAreComplete) {
  comm::LocalWorldOptions options;
  std::mutex mutex;
  std::vector<comm::OperationEvent> events;
  options.on_operation = [&](const comm::OperationEvent& event) {
    if (event.rank == 0) std::this_thread::sleep_for(10ms);
    std::lock_guard lock(mutex);
    if (event.rank == 1) events.push_back(event);
    return comm::Fault::None;
  };
  for (const auto& told : tell_injected(options, kTwoReductions)) EXPECT_FALSE(told);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[1].op, "all_reduce");
  EXPECT_EQ(events[1].comm, "faulty");
  EXPECT_EQ(events[1].label, "b");
  EXPECT_EQ(events[1].sequence, 1U);
  EXPECT_EQ(events[1].count, 3);
}

TEST(LocalWorld, BodyThrowsThenOthersAreReleasedAndTheCauseComesOut) {
  const auto start = std::chrono::steady_clock::now();
  try {
    comm::run_local_world(3, [](const WorldPtr& world) {
      auto comm = world->make_communicator("c");
      if (world->rank() == 2) throw std::runtime_error("the cause");
      if (world->rank() == 0) (void)world->store().get("never set", 20s);
      comm->barrier();
    });
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(LocalWorld, WrongRankListThenUsageError) {
  comm::run_local_world(2, [](const WorldPtr& world) {
    EXPECT_THROW((void)world->make_communicator("x", {1 - world->rank()}), UsageError);
    EXPECT_THROW((void)world->make_communicator("x", {1, 0}), UsageError);
    EXPECT_THROW((void)world->make_communicator("x", {0, 1, 2}), UsageError);
  });
  EXPECT_THROW(comm::run_local_world(0, [](const WorldPtr&) {}), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

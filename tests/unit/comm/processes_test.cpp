// Rendezvous and its faults, and the death of a rank, with real processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "comm/rendezvous.h"
#include "comm/socket.h"
#include "comm/store.h"
#include "fsdpp/base/error.h"
#include "support/processes.h"

namespace fsdpp::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

constexpr int kConfigError = 2, kInitTimeout = 3, kCommError = 4;

struct Limits {
  int timeout_ms = 20000;
  int rendezvous_ms = 4000;  // a process needs a second to start on a busy machine
  std::chrono::milliseconds all = 12s;
};

std::vector<ProcessResult> run(const std::string& mode, const std::vector<Environment>& ranks, Limits limits = {}) {
  return run_processes(
      {FSDPP_TEST_FAULT_RANK, mode, std::to_string(limits.timeout_ms), std::to_string(limits.rendezvous_ms)}, ranks,
      limits.all);
}

void expect_all(const std::vector<ProcessResult>& results, int exit_code, const testing::Matcher<std::string>& output) {
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_FALSE(results[i].late) << i;
    EXPECT_EQ(results[i].exit_code, exit_code) << i << ": " << results[i].output;
    EXPECT_THAT(results[i].output, output) << i;
  }
}

TEST(Rendezvous, AllRanksThereThenEveryOneIsReady) {
  expect_all(run("step", rank_environments(3, free_port())), 0, HasSubstr("fine"));
}

TEST(Rendezvous, OneProcessAloneThenNoStoreIsNeeded) {
  Environment alone = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  expect_all(run("step", {{}, alone}), 0, HasSubstr("fine"));
}

TEST(Rendezvous, RankTwiceThenEveryRankIsToldWhich) {
  auto ranks = rank_environments(3, free_port());
  ranks[2]["RANK"] = ranks[2]["LOCAL_RANK"] = "1";
  expect_all(run("init", ranks), kConfigError,
             AllOf(HasSubstr("RANK=1"), HasSubstr("two processes"), HasSubstr("pid")));
}

TEST(Rendezvous, RankZeroTwiceThenEveryRankIsTold) {
  auto ranks = rank_environments(2, free_port());
  ranks[1]["RANK"] = ranks[1]["LOCAL_RANK"] = "0";
  expect_all(run("init", ranks), kConfigError, AllOf(HasSubstr("RANK=0"), HasSubstr("two processes")));
}

TEST(Rendezvous, WorldSizesDifferThenEveryRankIsToldBoth) {
  auto ranks = rank_environments(2, free_port());
  ranks[1]["WORLD_SIZE"] = ranks[1]["LOCAL_WORLD_SIZE"] = "3";
  expect_all(run("init", ranks), kConfigError, AllOf(HasSubstr("WORLD_SIZE"), HasSubstr("2"), HasSubstr("3")));
}

TEST(Rendezvous, RankBeyondWorldThenItSaysSoAndOthersNameTheMissingOne) {
  auto ranks = rank_environments(2, free_port());
  ranks[1]["RANK"] = "7";
  const auto results = run("init", ranks, {.rendezvous_ms = 1500});
  EXPECT_EQ(results[1].exit_code, kConfigError);
  EXPECT_THAT(results[1].output, AllOf(HasSubstr("RANK"), HasSubstr("7"), HasSubstr("WORLD_SIZE=2")));
  EXPECT_EQ(results[0].exit_code, kInitTimeout);
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("did not arrive: 1")));
}

TEST(Rendezvous, RankMissingThenOthersNameIt) {
  auto ranks = rank_environments(4, free_port());
  ranks.erase(ranks.begin() + 2);
  expect_all(run("init", ranks), kInitTimeout,
             AllOf(HasSubstr("WORLD_SIZE=4"), HasSubstr("3 arrived"), HasSubstr("did not arrive: 2"), HasSubstr("FSDPP_RENDEZVOUS_S")));
}

TEST(Rendezvous, TimeoutInTheEnvironmentThenItIsThat) {
  auto ranks = rank_environments(2, free_port());
  ranks.erase(ranks.begin() + 1);
  ranks[0]["FSDPP_RENDEZVOUS_S"] = "1";
  expect_all(run("init", ranks, {.rendezvous_ms = 60000}), kInitTimeout, HasSubstr("within 1 s"));
}

// Ranks that died on the way, by what they left in the store.
constexpr comm::VariableNames kNames{"RANK", "WORLD_SIZE"};

std::string init_timeout_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::InitTimeout);
    return error.what();
  }
  return "no error";
}

TEST(Rendezvous, RankDiedBeforeItSaidWhichThenItIsAmongTheMissing) {
  auto store = comm::make_memory_store();
  std::thread dying([&] {
    while (store->add("rendezvous/arrivals", 0) == 0) std::this_thread::sleep_for(1ms);
    store->add("rendezvous/arrivals", 1);
  });
  const auto text = init_timeout_of([&] { comm::rendezvous(*store, {.rank = 0, .world_size = 2, .who = "a"}, kNames, 300ms, false); });
  dying.join();
  EXPECT_THAT(text, AllOf(HasSubstr("1 arrived"), HasSubstr("did not arrive: 1")));
}

TEST(Rendezvous, FirstRankDiedBeforeItDecidedThenTheOthersNameIt) {
  auto store = comm::make_memory_store();
  store->set("rendezvous/arrival/1", comm::Arrival{.rank = 1, .world_size = 2, .who = "node7, pid 7"}.encode());
  store->add("rendezvous/arrivals", 1);
  const auto text = init_timeout_of([&] { comm::rendezvous(*store, {.rank = 0, .world_size = 2, .who = "a"}, kNames, 100ms, false); });
  EXPECT_THAT(text, AllOf(HasSubstr("all WORLD_SIZE=2"), HasSubstr("RANK=1"), HasSubstr("node7, pid 7")));
}

TEST(Rendezvous, NobodyListensThenAddressAndPortAreNamed) {
  const int port = free_port();
  expect_all(run("init", {rank_environments(2, port)[1]}, {.rendezvous_ms = 800}), kInitTimeout,
             AllOf(HasSubstr("MASTER_ADDR=127.0.0.1"), HasSubstr("MASTER_PORT=" + std::to_string(port)), HasSubstr("FSDPP_RENDEZVOUS_S")));
}

TEST(Rendezvous, PortTakenByAStrangerThenEveryRankNamesIt) {
  const comm::Socket stranger = comm::listen_tcp(0);  // takes connections, never answers
  const int port = comm::port_of(stranger);
  const auto results = run("init", rank_environments(2, port), {.rendezvous_ms = 1000});
  for (const auto& result : results) EXPECT_THAT(result.output, HasSubstr("MASTER_PORT=" + std::to_string(port)));
  EXPECT_EQ(results[0].exit_code, kConfigError) << results[0].output;
  EXPECT_EQ(results[1].exit_code, kInitTimeout) << results[1].output;
}

TEST(Rendezvous, FailureThenLaunchersErrorFileHasTheMessage) {
  const std::string path = testing::TempDir() + "fsdpp_error_file.json";
  Environment rank = rank_environments(2, free_port())[1];
  rank["TORCHELASTIC_ERROR_FILE"] = path;
  rank["MASTER_ADDR"] = "host \"quoted\"";
  EXPECT_EQ(run("init", {rank}, {.rendezvous_ms = 800})[0].exit_code, kInitTimeout);
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  std::remove(path.c_str());
  EXPECT_THAT(text.str(), AllOf(HasSubstr(R"({"message": {"message": ")"), HasSubstr(R"(host \"quoted\")"),
                                HasSubstr("timestamp")));
}

// As under torchrun: the agent's store is there before the ranks and outlives them.
TEST(Rendezvous, AgentServesTheStoreThenAllRanksAreClientsAndRestartsDoNotMeet) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore agent("127.0.0.1", options);
  auto ranks = rank_environments(2, agent.getPort());
  for (const char* attempt : {"0", "1"}) {
    for (auto& rank : ranks) {
      rank["TORCHELASTIC_USE_AGENT_STORE"] = "True";
      rank["TORCHELASTIC_RESTART_COUNT"] = attempt;
      rank["TORCHELASTIC_RUN_ID"] = "job";
    }
    expect_all(run("step", ranks), 0, HasSubstr("fine"));
  }
}

TEST(PeerDeath, RankIsKilledThenOthersNameItAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto results = run("die", rank_environments(3, free_port()));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (size_t r : {0U, 2U}) {
    EXPECT_EQ(results[r].exit_code, kCommError) << results[r].output;
    EXPECT_THAT(results[r].output,
                AllOf(HasSubstr("CommError " + std::to_string(static_cast<int>(CommErrc::RemoteDied))),
                      HasSubstr("rank 1 has ended"), HasSubstr("'layers.3 backward'")));
  }
}

TEST(PeerDeath, RankIsStoppedThenItsHeartbeatTells) {
  auto ranks = rank_environments(2, free_port());
  for (auto& rank : ranks) rank["FSDPP_HEARTBEAT_S"] = "1";
  const auto results = run("silent", ranks, {.all = 12s});
  EXPECT_EQ(results[0].exit_code, kCommError) << results[0].output;
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("rank 1"), HasSubstr("no sign of life")));
  EXPECT_TRUE(results[1].late) << "it was stopped, so only the test could end it";
}

TEST(WorldBarrier, RankDoesNotComeThenOthersNameIt) {
  const auto results = run("skip_barrier", rank_environments(3, free_port()), {.timeout_ms = 500});
  for (size_t r : {0U, 2U}) {
    EXPECT_EQ(results[r].exit_code, kCommError) << results[r].output;
    EXPECT_THAT(results[r].output, AllOf(HasSubstr("World::barrier"), HasSubstr("ranks 1")));
  }
}

}  // namespace
}  // namespace fsdpp::test

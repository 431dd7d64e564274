// Jobs of real processes: one rank that dies or stops in the middle of a step, two jobs at once, and a port that is taken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "comm/socket.h"
#include "launcher/port.h"
#include "support/processes.h"
#include "unit/field_faults/support.h"
#include "unit/launcher/run_program.h"

namespace fsdpp::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using launcher::testing::Outcome;
using launcher::testing::RunningProgram;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> job(int ranks, const std::vector<std::string>& victim_flags, const std::vector<std::string>& flags = {}) {
  std::vector<std::string> command{"--nproc-per-node", std::to_string(ranks)};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"--", FSDPP_TEST_VICTIM});
  command.insert(command.end(), victim_flags.begin(), victim_flags.end());
  return command;
}

struct Started {
  std::vector<pid_t> pids;
  std::vector<int> ports;
};

Started started(const std::string& out) {
  Started result;
  const std::regex line("pid (\\d+) port (\\d+)");
  for (std::sregex_iterator it(out.begin(), out.end(), line), end; it != end; ++it) {
    result.pids.push_back(std::stoi((*it)[1]));
    result.ports.push_back(std::stoi((*it)[2]));
  }
  return result;
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

void expect_nothing_left(const Outcome& outcome, int ranks) {
  const auto [pids, ports] = started(outcome.out);
  ASSERT_EQ(pids.size(), static_cast<size_t>(ranks)) << outcome.out << outcome.err;
  for (const pid_t pid : pids) EXPECT_FALSE(launcher::testing::is_alive(pid)) << pid;
  for (const int port : ports) {
    EXPECT_EQ(port, ports[0]);
    EXPECT_TRUE(launcher::can_listen(port)) << port;
  }
}

/// Four ranks; rank 2 goes wrong in step 3.
class RankFails : public ::testing::Test {
 protected:
  Outcome run(const std::string& how, const std::vector<std::string>& environment = {}) const {
    const auto outcome = launcher::testing::run(job(4, {std::string("--how=").append(how), std::string("--folder=").append(folder_.file(""))}), environment);
    EXPECT_LT(outcome.duration, 30s);
    EXPECT_EQ(count(outcome.out, "step 2\n"), 4) << outcome.out;
    EXPECT_THAT(outcome.out, AllOf(Not(HasSubstr("step 3")), Not(HasSubstr("result"))));
    EXPECT_EQ(count(outcome.err, "failed first"), 1) << outcome.err;
    expect_nothing_left(outcome, 4);
    std::vector<std::string> saved;
    for (const auto& entry : fs::directory_iterator(folder_.file(""))) saved.push_back(entry.path().filename().string());
    EXPECT_THAT(saved, ::testing::UnorderedElementsAre("step1", "step2")) << "no state of the failed step, whole or in part";
    return outcome;
  }
  const TempFolder folder_;
};

TEST_F(RankFails, PB26_KilledThenItsSignalIsReportedFirst) {
  const auto outcome = run("kill");
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL);
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("fsdpp-run: rank 2 \\(pid [0-9]+\\) failed first: signal 9 \\(SIGKILL\\)"));
}

TEST_F(RankFails, PB26_ExitsThenItsCodeIsReportedFirst) {
  const auto outcome = run("exit");
  EXPECT_EQ(outcome.exit_code, 13);
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("fsdpp-run: rank 2 \\(pid [0-9]+\\) failed first: exit code 13"));
}

TEST_F(RankFails, PB26_ThrowsThenItsMessageIsReportedFirst) {
  const auto outcome = run("throw");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, AllOf(::testing::ContainsRegex("fsdpp-run: rank 2 \\(pid [0-9]+\\) failed first: exit code 1\n"),
                                 HasSubstr("fsdpp-run: rank 2: the victim's own error\n")));
}

TEST_F(RankFails, PB26_ThrowsPastMainThenTheAbortAndItsMessageAreReportedFirst) {
  const auto outcome = run("terminate");
  EXPECT_EQ(outcome.exit_code, 128 + SIGABRT);
  EXPECT_THAT(outcome.err, AllOf(::testing::ContainsRegex("fsdpp-run: rank 2 \\(pid [0-9]+\\) failed first: signal 6 \\(SIGABRT\\)"),
                                 ::testing::ContainsRegex("fsdpp-run: rank 2: .*the victim's uncaught error")));
}

TEST_F(RankFails, PB26_StopsThenTheTimeOutNamesTheUnitAndTheRankThatIsMissing) {
  const auto outcome = run("hang", {"FSDPP_TIMEOUT_S=3"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_GE(outcome.duration, 3s);
  EXPECT_THAT(outcome.err, ::testing::ContainsRegex("fsdpp-run: rank [013]: .*all_gather #[0-9]+ 'first' .*never issued by rank 2")) << outcome.err;
}

// Without a launcher that ends them, the others end by themselves.
TEST(SurvivingRanks, PB26_DeadRankThenTheOthersEndWithAnErrorThatNamesIt) {
  for (const char* how : {"kill", "throw"}) {
    SCOPED_TRACE(how);
    const auto results = run_processes({FSDPP_TEST_VICTIM, std::string("--how=").append(how)}, rank_environments(4, free_port()), 30s);
    for (size_t r : {0U, 1U, 3U}) {
      EXPECT_FALSE(results[r].late) << r;
      EXPECT_EQ(results[r].exit_code, 1) << r << ": " << results[r].output;
      EXPECT_THAT(results[r].output, AllOf(HasSubstr("rank 2"), HasSubstr("step 2"), Not(HasSubstr("step 3")))) << r;
    }
  }
}

TEST(Jobs, PB27_TwoAtOnceThenEachEndsWithItsOwnResult) {
  RunningProgram a(job(2, {"--value=1"})), b(job(2, {"--value=100"}));
  const auto first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  for (const char* rank : {"[0] ", "[1] "}) {
    EXPECT_THAT(first.out, HasSubstr(std::string(rank).append("result 0.2500\n")));
    EXPECT_THAT(second.out, HasSubstr(std::string(rank).append("result 99.2500\n")));
  }
  expect_nothing_left(first, 2);
  expect_nothing_left(second, 2);
  EXPECT_NE(started(first.out).ports[0], started(second.out).ports[0]);
}

TEST(Jobs, PB27_TakenPortThenAnErrorWithItsNumberAndNobodyWaits) {
  const auto holder = comm::listen_tcp(0);
  const auto port = std::to_string(comm::port_of(holder));
  const auto outcome = launcher::testing::run(job(2, {}, {"--master-port", port}));
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_LT(outcome.duration, 10s);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr(port), HasSubstr("in use")));
  EXPECT_THAT(outcome.out, Not(HasSubstr("pid"))) << "no rank may have started";
}

// Without a launcher, which would have looked for a free port: the stranger takes connections and never answers.
TEST(Jobs, PB27_TakenPortWithoutALauncherThenEveryRankSaysSoInTime) {
  const auto stranger = comm::listen_tcp(0);
  const int port = comm::port_of(stranger);
  const auto results = run_processes({FSDPP_TEST_VICTIM}, rank_environments(3, port), 10s);
  for (size_t r = 0; r < results.size(); ++r) {
    EXPECT_FALSE(results[r].late) << r;
    EXPECT_EQ(results[r].exit_code, 1) << r << ": " << results[r].output;
    EXPECT_THAT(results[r].output, AllOf(HasSubstr("MASTER_PORT=" + std::to_string(port)), HasSubstr("another program"))) << r;
  }
}

TEST(Jobs, PB27_SamePortRightAfterTheEndThenTheJobStarts) {
  const auto port = std::to_string(free_port());
  for (int run = 0; run < 2; ++run) {
    const auto outcome = launcher::testing::run(job(2, {}, {"--master-port", port}));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(count(outcome.out, "result 0.2500\n"), 2) << outcome.out;
    EXPECT_EQ(std::to_string(started(outcome.out).ports.at(0)), port);
  }
}

}  // namespace
}  // namespace fsdpp::test

// fsdpp-run with real child processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "run_program.h"

namespace fsdpp::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using namespace std::chrono_literals;

std::set<std::string> set_of_lines(const std::string& text) {
  auto lines = lines_of(text);
  return {lines.begin(), lines.end()};
}

TEST(Launch, AllRanksSucceedThenZeroAndNothingReported) {
  const auto outcome = run_script(3, "exit 0");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "");
}

TEST(Launch, EveryRankThenGetsTorchrunsVariables) {
  const auto outcome = run_script(
      2,
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR "
      "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $FSDPP_RUN ${TORCHELASTIC_USE_AGENT_STORE-unset}");
  EXPECT_THAT(lines_of(outcome.out),
              UnorderedElementsAre("[0] 0 2 0 2 0 1 127.0.0.1 0 0 1 unset", "[1] 1 2 1 2 0 1 127.0.0.1 0 0 1 unset"));
}

TEST(Launch, SecondNodeOfTwoThenRanksFollowOnAndMasterIsTheGivenOne) {
  const auto outcome = run_script(
      2,
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID",
      {"--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "--master-port", "29511"});
  EXPECT_THAT(lines_of(outcome.out),
              UnorderedElementsAre("[2] 2 4 0 1 2 node0:29511 node0:29511", "[3] 3 4 1 1 2 node0:29511 node0:29511"));
}

TEST(Launch, OneRankThenOutputIsItsOwnWithoutPrefix) {
  const auto outcome = run_script(1, "printf 'a\\rb'; printf 'e' >&2");
  EXPECT_EQ(outcome.out, "a\rb");
  EXPECT_EQ(outcome.err, "e");
}

TEST(Launch, StdoutAndStderrThenKeptApart) {
  const auto outcome = run_script(2, "echo out; echo err >&2");
  EXPECT_THAT(lines_of(outcome.out), UnorderedElementsAre("[0] out", "[1] out"));
  EXPECT_THAT(lines_of(outcome.err), UnorderedElementsAre("[0] err", "[1] err"));
}

TEST(Launch, PartialLinesThenJoinedAndTheLastOneCompleted) {
  const auto outcome = run_script(2, "for part in a b c; do printf $part; sleep 0.02; done; echo; printf tail");
  EXPECT_EQ(set_of_lines(outcome.out), (std::set<std::string>{"[0] abc", "[0] tail", "[1] abc", "[1] tail"}));
}

TEST(Launch, ManyLinesFromAllRanksThenNoneLostOrMixed) {
  const auto outcome = run_script(4, "i=0; while [ $i -lt 2000 ]; do echo line $i of rank $RANK; i=$((i+1)); done");
  const auto lines = set_of_lines(outcome.out);
  EXPECT_EQ(lines.size(), 8000u);
  for (int rank : {0, 3})
    EXPECT_TRUE(lines.contains("[" + std::to_string(rank) + "] line 1999 of rank " + std::to_string(rank)));
}

TEST(Launch, RankExitsWithCodeThenThatCodeAndItsNumber) {
  const auto outcome = run_script(3, "[ $RANK = 2 ] && { echo went wrong >&2; exit 7; }; exec sleep 60");
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 2 (pid "), HasSubstr("failed first: exit code 7"),
                                 HasSubstr("last line on stderr: went wrong"), HasSubstr("ended 2 other ranks")));
  EXPECT_LT(outcome.duration, 5s);
}

TEST(Launch, RankDiesBySignalThenItsNameAnd128PlusSignal) {
  const auto outcome = run_script(2, "[ $RANK = 1 ] && kill -SEGV $$; exec sleep 60");
  EXPECT_EQ(outcome.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(outcome.err, HasSubstr("failed first: signal 11 (SIGSEGV)"));
}

TEST(Launch, PeersFailAfterwardsThenTheFirstFailureWins) {
  const auto outcome = run_script(3, "if [ $RANK = 1 ]; then exit 5; fi; trap 'exit 9' TERM; sleep 60 & wait");
  EXPECT_EQ(outcome.exit_code, 5);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("rank 1 (pid"), Not(HasSubstr("exit code 9"))));
}

TEST(Launch, ErrorFileThenItsMessageIsReported) {
  const auto outcome = run_script(
      2,
      R"([ $RANK = 1 ] && { echo '{"message": {"message": "expected 4 rows, got 3", "extraInfo": {"timestamp": "1"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1; }; exec sleep 60)");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("fsdpp-run: rank 1: expected 4 rows, got 3\n"));
}

TEST(Launch, ProgramMissingThenSaysSoAnd127) {
  const auto outcome = run({"--nproc-per-node", "2", "--", "/no/such/program"});
  EXPECT_EQ(outcome.exit_code, 127);
  EXPECT_THAT(outcome.err, HasSubstr("cannot start '/no/such/program': No such file or directory"));
}

TEST(Launch, LeftoverChildrenOfRanksThenEndedToo) {
  const auto outcome = run_script(2, "sleep 300 & echo $!; [ $RANK = 0 ] && { sleep 0.1; exit 3; }; wait");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_LT(outcome.duration, 5s);
  const auto lines = lines_of(outcome.out);
  ASSERT_FALSE(lines.empty());
  for (const auto& line : lines) EXPECT_FALSE(is_alive(std::stoi(line.substr(4)))) << line;
}

TEST(Launch, SuccessWithLeftoverChildThatHoldsTheOutputThenNoWait) {
  const auto outcome = run_script(2, "sleep 300 & exit 0");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_LT(outcome.duration, 5s);
}

TEST(Launch, TerminatedThenRanksGetTheSignalAndStatusSaysSo) {
  RunningProgram program(
      {"--nproc-per-node", "2", "--", "/bin/sh", "-c", "trap 'echo got it; exit 0' TERM; echo ready; sleep 60 & wait"});
  ASSERT_TRUE(program.wait_for_output("[0] ready"));
  ASSERT_TRUE(program.wait_for_output("[1] ready"));
  program.send(SIGTERM);
  const auto outcome = program.wait();
  EXPECT_EQ(outcome.exit_code, 128 + SIGTERM);
  EXPECT_THAT(lines_of(outcome.out), AllOf(Contains("[0] got it"), Contains("[1] got it")));
  EXPECT_LT(outcome.duration, 8s);
}

TEST(Launch, InterruptedTwiceThenNoGrace) {
  RunningProgram program(
      {"--nproc-per-node", "2", "--", "/bin/sh", "-c", "trap '' INT; echo ready; while :; do sleep 1; done"});
  ASSERT_TRUE(program.wait_for_output("[0] ready"));
  ASSERT_TRUE(program.wait_for_output("[1] ready"));
  program.send(SIGINT);
  std::this_thread::sleep_for(100ms);
  program.send(SIGINT);
  const auto outcome = program.wait();
  EXPECT_EQ(outcome.exit_code, 128 + SIGINT);
  EXPECT_LT(outcome.duration, 8s);
}

TEST(Launch, LauncherKilledThenRanksDieWithIt) {
  RunningProgram program({"--nproc-per-node", "2", "--", "/bin/sh", "-c", "echo $$; while :; do sleep 1; done"});
  ASSERT_TRUE(program.wait_for_output("[0] "));
  ASSERT_TRUE(program.wait_for_output("[1] "));
  const auto lines = lines_of(program.out());
  program.send(SIGKILL);
  EXPECT_EQ(program.wait().exit_code, 128 + SIGKILL);
  for (const auto& line : lines) {
    const pid_t pid = std::stoi(line.substr(4));
    for (int i = 0; i < 200 && is_alive(pid); ++i) std::this_thread::sleep_for(10ms);
    EXPECT_FALSE(is_alive(pid)) << line;
  }
}

TEST(Launch, TwoRunsAtOnceThenDifferentPortsAndRunIds) {
  const std::vector<std::string> arguments = {
      "--nproc-per-node", "2", "--", "/bin/sh", "-c", "echo port=$MASTER_PORT=$TORCHELASTIC_RUN_ID; sleep 0.3"};
  RunningProgram a(arguments), b(arguments);
  const auto lines_a = lines_of(a.wait().out), lines_b = lines_of(b.wait().out);
  ASSERT_EQ(lines_a.size(), 2u);
  ASSERT_EQ(lines_b.size(), 2u);
  EXPECT_EQ(lines_a[0].substr(4), lines_a[1].substr(4));
  const auto fields = [](const std::string& line) {
    return std::pair(line.substr(0, line.rfind('=')).substr(4), line.substr(line.rfind('=')));
  };
  EXPECT_NE(fields(lines_a[0]).first, fields(lines_b[0]).first);
  EXPECT_NE(fields(lines_a[0]).second, fields(lines_b[0]).second);
}

TEST(Launch, FailsOnceWithRestartAllowedThenSecondAttemptHasAFreshPort) {
  const auto outcome = run_script(2,
                                  "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS $MASTER_PORT; [ "
                                  "$TORCHELASTIC_RESTART_COUNT = 1 ] || { sleep 0.1; exit 4; }",
                                  {"--max-restarts", "2"});
  EXPECT_EQ(outcome.exit_code, 0);
  std::set<std::string> counts, ports;
  for (const auto& line : lines_of(outcome.out)) {
    counts.insert(line.substr(4, 3));
    ports.insert(line.substr(8));
  }
  EXPECT_THAT(counts, ElementsAre("0/2", "1/2"));
  EXPECT_EQ(ports.size(), 2u);
  EXPECT_THAT(outcome.err, HasSubstr("restarting all ranks of this node (1 of 2)"));
}

TEST(Launch, FailsEveryTimeThenStopsAfterTheAllowedRestarts) {
  const auto outcome = run_script(1, "echo try; exit 6", {"--max-restarts", "2"});
  EXPECT_EQ(outcome.exit_code, 6);
  EXPECT_EQ(outcome.out, "try\ntry\ntry\n");
}

TEST(Launch, StdinThenReachesRankZeroOnly) {
  const std::string inner = std::string("echo hello | ") + FSDPP_RUN_PATH + " --nproc-per-node 2 -- cat";
  EXPECT_EQ(run({"--", "/bin/sh", "-c", inner}).out, "[0] hello\n");
}

}  // namespace
}  // namespace fsdpp::launcher::testing

// The launcher's parts, in this process.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "launcher/cli.h"
#include "launcher/failure.h"
#include "launcher/launch.h"
#include "launcher/output.h"
#include "launcher/port.h"
#include "launcher/rank_variables.h"
#include "launcher/unique_fd.h"

namespace fsdpp::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

// ---- command line ----

CliResult parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "fsdpp-run");
  return parse_command_line(static_cast<int>(arguments.size()), arguments.data());
}

TEST(CommandLine, AllFlagsThenOptionsAndProgram) {
  const auto options =
      parse({"--nproc-per-node", "4", "--nnodes=2", "--node-rank", "1", "--master-addr", "h", "--master-port", "29500",
             "--max-restarts", "3", "--ranks-per-gpu", "2", "--", "prog", "--nproc-per-node", "9", "--", "x"})
          .options;
  ASSERT_TRUE(options);
  EXPECT_EQ(options->nproc_per_node, 4);
  EXPECT_EQ(options->world_size(), 8);
  EXPECT_EQ(options->first_rank(), 4);
  EXPECT_EQ(options->master_addr, "h");
  EXPECT_EQ(options->master_port, 29500);
  EXPECT_EQ(options->max_restarts, 3);
  EXPECT_EQ(options->ranks_per_gpu, 2);
  EXPECT_THAT(options->command, ElementsAre("prog", "--nproc-per-node", "9", "--", "x"));
}

TEST(CommandLine, UnderscoresAndNoDashesThenAccepted) {
  const auto options = parse({"--nproc_per_node", "2", "--max_restarts=1", "prog", "--flag", "value"}).options;
  ASSERT_TRUE(options);
  EXPECT_EQ(options->nproc_per_node, 2);
  EXPECT_EQ(options->max_restarts, 1);
  EXPECT_THAT(options->command, ElementsAre("prog", "--flag", "value"));
}

TEST(CommandLine, WrongInputThenStatusTwoAndTheFlagIsNamed) {
  const std::vector<std::pair<std::vector<const char*>, const char*>> cases = {
      {{"--nproc-per-node", "0", "p"}, "--nproc-per-node"},
      {{"--nproc-per-node", "two", "p"}, "--nproc-per-node"},
      {{"--nproc", "2", "p"}, "unknown flag '--nproc'"},
      {{}, "no program given"},
      {{"--nproc-per-node", "2", "--"}, "no program given"},
      {{"--nnodes", "2", "--node-rank", "2", "p"}, "--node-rank is 2; expected 0 to 1"},
      {{"--nnodes", "2", "p"}, "--master-addr and --master-port"},
      {{"--master-port", "70000", "p"}, "--master-port"},
  };
  for (const auto& [arguments, expected] : cases) {
    const auto result = parse(arguments);
    EXPECT_FALSE(result.options);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.text, HasSubstr(expected));
  }
}

TEST(CommandLine, HelpThenTextAndZero) {
  const auto result = parse({"--help"});
  EXPECT_FALSE(result.options);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.text, HasSubstr("--ranks-per-gpu"));
}

// ---- variables ----

const Attempt kAttempt{.restart_count = 1, .run_id = "run", .master_addr = "127.0.0.1", .master_port = 5};

TEST(RankVariables, RanksPerGpuThenEachRankIsAHostOfItsOwnOnTheSocketPath) {
  LaunchOptions options;
  options.nproc_per_node = 2;
  options.ranks_per_gpu = 2;
  const auto rank0 = rank_variables(options, kAttempt, 0, "e", {}),
             rank1 = rank_variables(options, kAttempt, 1, "e", {});
  EXPECT_NE(rank0.at("NCCL_HOSTID"), rank1.at("NCCL_HOSTID"));
  EXPECT_EQ(rank0.at("NCCL_SOCKET_IFNAME"), "=lo");
  EXPECT_EQ(rank0.at("NCCL_IB_DISABLE"), "1");
  EXPECT_EQ(rank0.at("NCCL_NVLS_ENABLE"), "0");
  EXPECT_EQ(rank0.at("FSDPP_RANKS_PER_GPU"), "2");
}

TEST(RankVariables, UserHasSetANcclVariableThenItStays) {
  LaunchOptions options;
  options.ranks_per_gpu = 2;
  const Variables inherited = {{"NCCL_ALGO", "Tree"}};
  const auto environment = merge_variables(inherited, rank_variables(options, kAttempt, 0, "e", inherited));
  EXPECT_THAT(environment, Contains("NCCL_ALGO=Tree"));
  EXPECT_THAT(environment, Not(Contains("NCCL_ALGO=Ring")));
}

TEST(RankVariables, OneRankAGpuThenNcclIsLeftAlone) {
  for (const auto& [name, value] : rank_variables(LaunchOptions{}, kAttempt, 0, "e", {}))
    EXPECT_THAT(name, Not(HasSubstr("NCCL")));
}

TEST(RankVariables, OuterTorchrunThenItsStoreIsForgotten) {
  const auto environment =
      merge_variables({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"RANK", "9"}, {"KEEP", "1"}}, {{"RANK", "0"}});
  EXPECT_THAT(environment, ElementsAre("KEEP=1", "RANK=0"));
}

TEST(RankVariables, ThreadsThenSharedAmongRanksUnlessSet) {
  LaunchOptions options;
  options.nproc_per_node = 100'000;
  EXPECT_EQ(rank_variables(options, kAttempt, 0, "e", {}).at("OMP_NUM_THREADS"), "1");
  EXPECT_FALSE(rank_variables(options, kAttempt, 0, "e", {{"OMP_NUM_THREADS", "7"}}).contains("OMP_NUM_THREADS"));
  options.nproc_per_node = 1;
  EXPECT_FALSE(rank_variables(options, kAttempt, 0, "e", {}).contains("OMP_NUM_THREADS"));
}

// ---- lines ----

class LineWriterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    read_ = UniqueFd(ends[0]);
    write_ = UniqueFd(ends[1]);
    ::fcntl(read_.get(), F_SETFL, O_NONBLOCK);
  }
  std::string written() {
    std::string text(1 << 20, '\0');
    const auto count = ::read(read_.get(), text.data(), text.size());
    text.resize(count < 0 ? 0 : static_cast<size_t>(count));
    return text;
  }
  UniqueFd read_, write_;
};

TEST_F(LineWriterTest, HalfALineThenHeldBackUntilItIsWhole) {
  LineWriter writer(write_.get(), "[0] ");
  writer.feed("ab");
  EXPECT_EQ(written(), "");
  writer.feed("c\nd");
  EXPECT_EQ(written(), "[0] abc\n");
  writer.finish();
  EXPECT_EQ(written(), "[0] d\n");
  writer.finish();
  EXPECT_EQ(written(), "");
}

TEST_F(LineWriterTest, CarriageReturnsThenProgressBarsAndDosLines) {
  LineWriter writer(write_.get(), "> ");
  writer.feed("10%\r20%\r");
  EXPECT_EQ(written(), "> 10%\r");
  writer.feed("\nx\r\n\n");
  EXPECT_EQ(written(), "> 20%\r\n> x\r\n> \n");
  EXPECT_EQ(writer.last_line(), "x");
}

TEST_F(LineWriterTest, EndlessLineThenWrittenInParts) {
  LineWriter writer(write_.get(), "> ");
  ::fcntl(write_.get(), F_SETPIPE_SZ, 1 << 20);
  writer.feed(std::string(LineWriter::kMaxLine + 5, 'x'));
  EXPECT_EQ(written().size(), 2 + LineWriter::kMaxLine + 1);
  writer.finish();
  EXPECT_EQ(written(), "> xxxxx\n");
}

// ---- ports ----

TEST(Port, ReservedThenAnotherReservationDiffersAndAServerCanStillListen) {
  PortReservation a, b;
  EXPECT_NE(a.port(), b.port());
  EXPECT_TRUE(can_listen(a.port()));
}

TEST(Port, HeldThenFreePortsOfOthersPassItBy) {
  PortReservation reservation;
  ASSERT_TRUE(reservation.held());
  UniqueFd other(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(reservation.port()));
  EXPECT_NE(::bind(other.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
}

TEST(Port, TakenMasterPortThenErrorNamesIt) {
  PortReservation reservation;
  UniqueFd server(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  ::setsockopt(server.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(reservation.port()));
  ASSERT_EQ(::bind(server.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(server.get(), 1), 0);
  LaunchOptions options;
  options.master_port = reservation.port();
  options.command = {"/bin/true"};
  try {
    (void)launch(options);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("--master-port " + std::to_string(reservation.port()) + " is in use"));
  }
}

// ---- failures ----

std::string temporary_file(const std::string& content) {
  const std::string path = ::testing::TempDir() + "fsdpp_error_file_" + std::to_string(::getpid());
  std::ofstream(path) << content;
  return path;
}

TEST(ErrorFile, BothFormsOfTorchrunThenTheMessage) {
  EXPECT_EQ(read_error_file(temporary_file(R"({"message": {"message": "deep", "extraInfo": {}}})"))->text, "deep");
  EXPECT_EQ(read_error_file(temporary_file(R"({"message": "flat"})"))->text, "flat");
}

TEST(ErrorFile, OtherContentThenItsTextAndNoFileThenNothing) {
  EXPECT_EQ(read_error_file(temporary_file("not json"))->text, "not json");
  EXPECT_EQ(read_error_file(temporary_file(R"({"message": 3})"))->text, R"({"message": 3})");
  EXPECT_FALSE(read_error_file(temporary_file("")));
  EXPECT_FALSE(read_error_file("/no/such/file"));
}

RankEnd rank_end(int rank, int signal, int code, int64_t time = INT64_MAX) {
  RankEnd end;
  end.rank = rank;
  end.signal = signal;
  end.exit_code = code;
  end.message_time_ns = time;
  return end;
}

TEST(FirstFailure, SeenAtOnceThenSignalThenEarlierMessageThenLowerRank) {
  EXPECT_TRUE(is_earlier(rank_end(2, SIGSEGV, 0), rank_end(0, 0, 1, 5)));
  EXPECT_TRUE(is_earlier(rank_end(2, 0, 1, 5), rank_end(0, 0, 1, 6)));
  EXPECT_TRUE(is_earlier(rank_end(2, 0, 1, 5), rank_end(0, 0, 1)));
  EXPECT_TRUE(is_earlier(rank_end(0, 0, 1), rank_end(1, 0, 1)));
  EXPECT_FALSE(is_earlier(rank_end(1, 0, 1), rank_end(0, 0, 1)));
}

// ---- stopping ----

TEST(Stopping, RankIgnoresSigtermThenKilledAfterTheGrace) {
  LaunchOptions options;
  options.nproc_per_node = 2;
  options.grace = 300ms;
  UniqueFd null(::open("/dev/null", O_WRONLY));
  options.out_fd = options.err_fd = null.get();
  options.command = {"/bin/sh", "-c",
                     "trap '' TERM; [ $RANK = 1 ] && { sleep 0.1; exit 2; }; while :; do sleep 1; done"};
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(options), 2);
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, 300ms);
  EXPECT_LT(took, 5s);
}

TEST(Stopping, DefaultGraceThenWithinThirtySecondsInAll) { EXPECT_LE(LaunchOptions{}.grace, 10s); }

}  // namespace
}  // namespace fsdpp::launcher

// What NCCL communicators tell of faults. Starts its ranks itself, all on one GPU; fails without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "comm/nccl_api.h"
#include "fsdpp/base/error.h"
#include "fsdpp/cuda/stream.h"
#include "support/processes.h"

namespace fsdpp::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kCommError = 4;

std::string told(CommErrc code) { return "CommError " + std::to_string(static_cast<int>(code)) + ":"; }

std::vector<Environment> ranks_on_one_gpu(int size) {
  const int port = free_port();
  auto ranks = rank_environments(size, port);
  for (int r = 0; r < size; ++r) {
    Environment& rank = ranks[static_cast<size_t>(r)];
    rank.merge(Environment{{"FSDPP_TEST_DEVICE", "cuda"},
                           {"FSDPP_RANKS_PER_GPU", std::to_string(size)},
                           {"NCCL_HOSTID", "test" + std::to_string(port) + "-" + std::to_string(r)},
                           {"NCCL_NET", "Socket"},
                           {"NCCL_SOCKET_IFNAME", "=lo"},
                           {"NCCL_IB_DISABLE", "1"},
                           {"NCCL_ALGO", "Ring"},
                           {"NCCL_PROTO", "Simple"},
                           {"NCCL_MAX_CTAS", "2"},
                           {"NCCL_RAS_ENABLE", "0"},
                           {"CUDA_DEVICE_MAX_CONNECTIONS", "32"},
                           {"CUDA_MODULE_LOADING", "EAGER"}});
  }
  return ranks;
}

std::vector<ProcessResult> run(const std::string& mode, int size, int timeout_ms = 20000) {
  return run_processes({FSDPP_TEST_FAULT_RANK, mode, std::to_string(timeout_ms)}, ranks_on_one_gpu(size), 60s);
}

class NcclFault : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(cuda::available()) << "this program needs a GPU"; }
};

TEST_F(NcclFault, NoneThenFine) {
  for (const auto& result : run("step", 2)) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST_F(NcclFault, RankIsKilledThenOthersNameIt) {
  const auto start = std::chrono::steady_clock::now();
  const auto results = run("die", 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 40s);
  for (size_t r : {0U, 2U}) {
    EXPECT_EQ(results[r].exit_code, kCommError) << results[r].output;
    EXPECT_THAT(results[r].output, AllOf(HasSubstr(told(CommErrc::RemoteDied)), HasSubstr("rank 1")));
  }
}

// On one GPU the buffers are plain memory; the reason is said, and the failure is as any other.
TEST_F(NcclFault, RankIsKilledAmidBuffersThatCouldNotBeRegisteredThenOthersNameIt) {
  for (const char* mode : {"die_symmetric", "die_copy_engine"}) {
    const auto results = run(mode, 2);
    EXPECT_EQ(results[0].exit_code, kCommError) << results[0].output;
    EXPECT_THAT(results[0].output, AllOf(HasSubstr(told(CommErrc::RemoteDied)), HasSubstr("rank 1"),
                                         HasSubstr("plain memory is used"), HasSubstr("ranks 0 and 1 are on different hosts")));
  }
}

TEST_F(NcclFault, RankNeverIssuesThenTimeoutNamesOperationAndRank) {
  const auto results = run("never", 3, 1500);
  for (size_t r : {0U, 2U}) {
    EXPECT_EQ(results[r].exit_code, kCommError) << results[r].output;
    EXPECT_THAT(results[r].output, AllOf(HasSubstr(told(CommErrc::Timeout)), HasSubstr("'layers.3 backward'"),
                                         HasSubstr("started on: rank"),
                                         HasSubstr("never issued by: rank 1 (last issued all_reduce #1 'before')")));
  }
}

TEST_F(NcclFault, OperationsDifferThenEveryRankIsToldBoth) {
  for (const auto& result : run("mismatch", 2, 1500)) {
    EXPECT_EQ(result.exit_code, kCommError) << result.output;
    EXPECT_THAT(result.output, AllOf(HasSubstr(told(CommErrc::Mismatch)), HasSubstr("50000000 Float 'first'"),
                                     HasSubstr("1000 Float 'second'")));
  }
}

TEST_F(NcclFault, StreamIsBusyLongerThanTheTimeoutThenNoFailure) {
  for (const auto& result : run("busy", 2, 1000)) EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST_F(NcclFault, AbortFromAnotherThreadThenEveryWaiterIsReleased) {
  const auto results = run("abort", 3);
  for (size_t r : {0U, 2U}) {
    EXPECT_EQ(results[r].exit_code, kCommError) << results[r].output;
    EXPECT_THAT(results[r].output, AllOf(HasSubstr(told(CommErrc::Aborted)), HasSubstr("for the test")));
  }
}

TEST(NcclVersion, MinorDiffersThenErrorNamesBothAndThePath) {
  comm::check_nccl_version(22809, 22803, "libnccl.so.2");  // a patch level apart is fine
  try {
    comm::check_nccl_version(22809, 22707, "/somewhere/libnccl.so.2");
    FAIL();
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("2.28.9"), HasSubstr("2.27.7"), HasSubstr("/somewhere/libnccl.so.2")));
  }
}

TEST(NcclTypes, DtypeHasNoCounterpartThenUsageError) {
  EXPECT_EQ(comm::to_nccl(c10::kBFloat16), ncclBfloat16);
  EXPECT_THROW((void)comm::to_nccl(c10::kShort), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

// The program as a user starts it, by fsdpp-run.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "unit/launcher/run_program.h"

namespace minillm {
namespace {

using fsdpp::launcher::testing::run;

std::string weights_of(int ranks, const std::string& seed, const std::vector<std::string>& more = {"--deferred-init", "--steps", "0"}) {
  const auto path = testing::TempDir() + "minillm_program_test.safetensors";
  std::vector<std::string> command{"--nproc-per-node", std::to_string(ranks), "--", MINILLM_PATH, "--device", "cpu", "--data", "synthetic",
                                   "--vocab", "67", "--dim", "24", "--layers", "3", "--heads", "2", "--batch", "1", "--seq", "4",
                                   "--seed", seed, "--save-full", path};
  command.insert(command.end(), more.begin(), more.end());
  const auto outcome = run(command);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  std::remove(path.c_str());
  return bytes.str();
}

TEST(Program, DeferredInitThenTheSavedFileIsTheSameForEveryNumberOfRanks) {
  const auto want = weights_of(1, "7");
  EXPECT_GT(want.size(), 67U * 24 * 4 * 2);
  for (const int ranks : {2, 3, 4}) EXPECT_TRUE(weights_of(ranks, "7") == want) << ranks;
  EXPECT_FALSE(weights_of(1, "8") == want);
}

TEST(Program, SymmetricBuffersOnTheCpuThenTheSameWeights) {
  const auto want = weights_of(2, "7", {"--steps", "3"});
  EXPECT_TRUE(weights_of(2, "7", {"--steps", "3", "--symmetric-buffers"}) == want);
  EXPECT_TRUE(weights_of(2, "7", {"--steps", "3", "--copy-engine-gathers", "--precision", "fp32"}) == want);
  EXPECT_FALSE(weights_of(2, "7", {"--steps", "2"}) == want);
}

}  // namespace
}  // namespace minillm

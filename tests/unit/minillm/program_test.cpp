// The program as a user starts it, by fsdpp-run.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "unit/launcher/run_program.h"

namespace minillm {
namespace {

using fsdpp::launcher::testing::run;

std::string weights_of(int ranks, const std::string& seed) {
  const auto path = testing::TempDir() + "minillm_program_test.safetensors";
  const auto outcome = run({"--nproc-per-node", std::to_string(ranks), "--", MINILLM_PATH, "--device", "cpu", "--data", "synthetic",
                            "--vocab", "67", "--dim", "24", "--layers", "3", "--heads", "2", "--batch", "1", "--seq", "4",
                            "--steps", "0", "--deferred-init", "--seed", seed, "--save-full", path});
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

}  // namespace
}  // namespace minillm

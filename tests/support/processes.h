#pragma once
#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace fsdpp::test {

/// A child process with its output in one string.
struct ProcessResult {
  int exit_code = -1;  ///< -1: ended by `signal`, or by us at the deadline
  int signal = 0;
  bool late = false;   ///< still there at the deadline, and killed
  std::string output;  ///< standard output and error
};

using Environment = std::map<std::string, std::string>;

/// Starts one process for each entry of `environments` (added to ours; an empty value unsets) and waits for all of
/// them. RANK and the like of an outer launcher are removed first.
[[nodiscard]] std::vector<ProcessResult> run_processes(const std::vector<std::string>& command,
                                                       const std::vector<Environment>& environments,
                                                       std::chrono::milliseconds limit);

/// Environments of ranks 0 … size-1 as torchrun sets them, with the store at 127.0.0.1:port.
[[nodiscard]] std::vector<Environment> rank_environments(int size, int port);

/// A port that nobody listens on now.
[[nodiscard]] int free_port();

}  // namespace fsdpp::test

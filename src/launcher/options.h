#pragma once
#include <chrono>
#include <string>
#include <vector>

namespace fsdpp::launcher {

/// What one `fsdpp-run` on one node is asked to do.
struct LaunchOptions {
  int nproc_per_node = 1;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr;  ///< empty: 127.0.0.1 (one node only)
  int master_port = 0;      ///< 0: a free port chosen for each attempt (one node only)
  int max_restarts = 0;
  int ranks_per_gpu = 0;  ///< 0: one rank a GPU, nothing set
  std::vector<std::string> command;

  /// From SIGTERM to SIGKILL when ranks are stopped.
  std::chrono::milliseconds grace{std::chrono::seconds(10)};
  /// Where the ranks' lines go.
  int out_fd = 1;
  int err_fd = 2;

  [[nodiscard]] int world_size() const { return nproc_per_node * nnodes; }
  [[nodiscard]] int first_rank() const { return nproc_per_node * node_rank; }
};

}  // namespace fsdpp::launcher

#pragma once
#include "launcher/options.h"

namespace fsdpp::launcher {

/// Runs the job's ranks of this node, restarts included, reports a failure on options.err_fd, and returns the exit
/// status: 0, the first failing rank's code or 128 + signal, or 128 + the signal that this process received. Throws
/// fsdpp::Error when the system refuses a process or pipe. REQUIRES: no threads.
[[nodiscard]] int launch(const LaunchOptions& options);

}  // namespace fsdpp::launcher

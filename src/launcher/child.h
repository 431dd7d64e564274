#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "launcher/unique_fd.h"

namespace fsdpp::launcher {

struct ChildSpec {
  const std::vector<std::string>& command;
  const std::vector<std::string>& environment;
  bool capture = false;    ///< stdout and stderr through pipes; otherwise inherited
  bool own_group = true;   ///< in a process group of its own, so that its children can be signalled with it
  bool keep_stdin = true;  ///< otherwise /dev/null
};

struct Child {
  pid_t pid = -1;
  UniqueFd out, err;    ///< read ends, non-blocking; empty without capture
  int start_error = 0;  ///< errno when the program could not be started; pid is then -1
};

/// Forks and executes. The child is killed by the kernel when this process dies. REQUIRES: no threads.
[[nodiscard]] Child spawn(const ChildSpec& spec);

}  // namespace fsdpp::launcher

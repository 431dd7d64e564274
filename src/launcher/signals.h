#pragma once
#include <signal.h>

#include <optional>

#include "launcher/unique_fd.h"

namespace fsdpp::launcher {

/// While it lives, SIGCHLD, SIGINT, SIGTERM, SIGHUP and SIGQUIT of this process arrive here instead of interrupting it,
/// and SIGPIPE is ignored.
class SignalQueue {
 public:
  struct Signal {
    int number = 0;
    bool from_terminal = false;  ///< sent by the kernel to the whole foreground group, not by kill()
  };

  SignalQueue();
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable (poll) when next() has something.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// The next pending signal; never blocks.
  [[nodiscard]] std::optional<Signal> next() const;

 private:
  UniqueFd fd_;
  sigset_t old_mask_{};
  struct sigaction old_pipe_ {};
};

}  // namespace fsdpp::launcher

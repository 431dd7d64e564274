#include "launcher/signals.h"

#include <sys/signalfd.h>

#include <cerrno>
#include <cstring>

#include "base/enforce.h"

namespace fsdpp::launcher {

SignalQueue::SignalQueue() {
  sigset_t mask;
  sigemptyset(&mask);
  for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&mask, number);
  ::sigprocmask(SIG_BLOCK, &mask, &old_mask_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &old_pipe_);
  fd_ = UniqueFd(::signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!fd_) fail<Error>("fsdpp-run: signalfd failed: {}", std::strerror(errno));
}

SignalQueue::~SignalQueue() {
  while (next()) {
  }
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

std::optional<SignalQueue::Signal> SignalQueue::next() const {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return Signal{static_cast<int>(info.ssi_signo), info.ssi_code == SI_KERNEL};
}

}  // namespace fsdpp::launcher

#include "launcher/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/enforce.h"

namespace fsdpp::launcher {
namespace {

struct Pipe {
  UniqueFd read, write;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail<Error>("fsdpp-run: pipe failed: {}", std::strerror(errno));
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

void reset_signals() {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGPIPE, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// In the child, between fork and exec: async-signal-safe calls only.
[[noreturn]] void become(const ChildSpec& spec, char* const* argv, char* const* envp, int out, int err, int report,
                         pid_t parent) {
  reset_signals();
  if (spec.own_group) ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(128 + SIGKILL);  // the launcher died before the line above
  if (!spec.keep_stdin) {
    const int null = ::open("/dev/null", O_RDONLY);
    if (null >= 0) ::dup2(null, STDIN_FILENO);
  }
  if (out >= 0) ::dup2(out, STDOUT_FILENO);
  if (err >= 0) ::dup2(err, STDERR_FILENO);
  ::execvpe(argv[0], argv, envp);
  const int error = errno;
  [[maybe_unused]] auto written = ::write(report, &error, sizeof error);
  ::_exit(127);
}

}  // namespace

Child spawn(const ChildSpec& spec) {
  const auto argv = pointers(spec.command);
  const auto envp = pointers(spec.environment);
  Pipe out, err, report = make_pipe();
  if (spec.capture) {
    out = make_pipe();
    err = make_pipe();
  }
  const pid_t parent = ::getpid();
  Child child;
  child.pid = ::fork();
  if (child.pid < 0) fail<Error>("fsdpp-run: fork failed: {}", std::strerror(errno));
  if (child.pid == 0)
    become(spec, argv.data(), envp.data(), out.write.get(), err.write.get(), report.write.get(), parent);

  if (spec.own_group) ::setpgid(child.pid, child.pid);  // in both, so that neither has to wait for the other
  report.write.reset();
  ssize_t count;
  while ((count = ::read(report.read.get(), &child.start_error, sizeof child.start_error)) < 0 && errno == EINTR) {
  }
  if (count > 0) {
    ::waitpid(child.pid, nullptr, 0);
    child.pid = -1;
  }
  child.out = std::move(out.read);
  child.err = std::move(err.read);
  for (int fd : {child.out.get(), child.err.get()})
    if (fd >= 0) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return child;
}

}  // namespace fsdpp::launcher

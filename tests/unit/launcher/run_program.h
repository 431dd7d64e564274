#pragma once
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace fsdpp::launcher::testing {

struct Outcome {
  int exit_code = -1;  ///< 128 + signal if a signal ended it
  std::string out, err;
  std::chrono::milliseconds duration{0};
};

/// fsdpp-run as a child of its own, its output in files. Killed with its group if the test ends first.
class RunningProgram {
 public:
  explicit RunningProgram(const std::vector<std::string>& arguments,
                          const std::vector<std::string>& extra_environment = {});
  ~RunningProgram();
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  /// What it wrote to standard output so far.
  [[nodiscard]] std::string out() const;
  /// Blocks until `text` is in out(); false after 20 s.
  [[nodiscard]] bool wait_for_output(const std::string& text) const;
  void send(int signal) const { ::kill(pid_, signal); }
  [[nodiscard]] Outcome wait();

 private:
  std::string folder_;
  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point start_;
};

/// fsdpp-run with these arguments, to its end.
[[nodiscard]] Outcome run(const std::vector<std::string>& arguments,
                          const std::vector<std::string>& extra_environment = {});

/// fsdpp-run --nproc-per-node `ranks` -- /bin/sh -c `script`.
[[nodiscard]] Outcome run_script(int ranks, const std::string& script, const std::vector<std::string>& flags = {});

[[nodiscard]] std::vector<std::string> lines_of(const std::string& text);
/// Whether a process with that id exists and is no zombie.
[[nodiscard]] bool is_alive(pid_t pid);

}  // namespace fsdpp::launcher::testing

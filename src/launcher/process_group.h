#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launcher/child.h"
#include "launcher/failure.h"
#include "launcher/options.h"
#include "launcher/output.h"
#include "launcher/rank_variables.h"
#include "launcher/signals.h"

namespace fsdpp::launcher {

/// How one attempt ended.
struct GroupResult {
  std::optional<RankEnd> first_failure;
  std::vector<RankEnd> later_failures;  ///< ended by themselves, with an error, before they were stopped
  int stopped = 0;                      ///< ranks that fsdpp-run ended
  int interrupted_by = 0;               ///< signal that fsdpp-run received
  std::vector<int> unkillable;          ///< pids that outlived SIGKILL
};

/// The ranks of this node in one attempt: started together, ended together.
class ProcessGroup {
 public:
  /// `error_folder`: a folder for the ranks' error files.
  ProcessGroup(const LaunchOptions& options, const Attempt& attempt, const std::string& error_folder,
               const SignalQueue& signals);
  /// Kills what still runs.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  /// Starts all ranks and returns when none is left. Once a rank fails, or this process is asked to end, all others get
  /// SIGTERM (the signal that was received), and SIGKILL after the grace period.
  [[nodiscard]] GroupResult run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    int number = 0;
    Child child;
    LineWriter out, err;
    std::string error_file;
    bool ended = false;
  };

  void start_all(const Attempt& attempt);
  void start(const Attempt& attempt, int local_rank);
  void wait_for_events();
  void read_output(Rank& rank, int fd);
  void handle_signals();
  void collect_ends();
  RankEnd end_of(const Rank& rank, int code, int status) const;
  void note_failures(std::vector<RankEnd> ends);
  void stop(int signal);
  void escalate();
  void signal_all(int signal);
  void finish();
  [[nodiscard]] bool running() const;
  [[nodiscard]] int poll_timeout_ms() const;

  const LaunchOptions& options_;
  const SignalQueue& signals_;
  std::string error_folder_;
  std::vector<Rank> ranks_;
  GroupResult result_;
  bool capture_;
  bool own_group_;
  bool stopping_ = false;
  bool killed_ = false;
  bool gave_up_ = false;
  Clock::time_point deadline_{};
};

}  // namespace fsdpp::launcher

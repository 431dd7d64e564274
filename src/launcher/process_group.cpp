#include "launcher/process_group.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fsdpp::launcher {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAfterKill{10'000};  // for a process that SIGKILL does not end at once (driver calls)
constexpr milliseconds kDrain{1'000};       // for output that is still in a pipe when all ranks have ended
constexpr int kCannotStart = 127;

void kill_rank(pid_t pid, int signal, bool group) {
  if (pid > 0) ::kill(group ? -pid : pid, signal);
}

bool is_readable(int fd, int timeout_ms) {
  pollfd ready{fd, POLLIN, 0};
  return ::poll(&ready, 1, timeout_ms) > 0;
}

}  // namespace

ProcessGroup::ProcessGroup(const LaunchOptions& options, const Attempt& attempt, const std::string& error_folder,
                           const SignalQueue& signals)
    : options_(options),
      signals_(signals),
      error_folder_(error_folder),
      capture_(options.nproc_per_node > 1),
      own_group_(capture_ || ::isatty(STDIN_FILENO) == 0) {
  start_all(attempt);
}

ProcessGroup::~ProcessGroup() {
  for (auto& rank : ranks_) {
    if (rank.child.pid <= 0) continue;
    kill_rank(rank.child.pid, SIGKILL, own_group_);
    if (!gave_up_) ::waitpid(rank.child.pid, nullptr, 0);
  }
}

void ProcessGroup::start_all(const Attempt& attempt) {
  ranks_.reserve(static_cast<size_t>(options_.nproc_per_node));
  for (int local = 0; local < options_.nproc_per_node && !stopping_; ++local) start(attempt, local);
}

void ProcessGroup::start(const Attempt& attempt, int local_rank) {
  const int number = options_.first_rank() + local_rank;
  const std::string prefix = fmt::format("[{}] ", number);
  const std::string error_file = error_folder_ + "/rank" + std::to_string(number) + ".json";
  const auto inherited = inherited_variables();
  const auto environment =
      merge_variables(inherited, rank_variables(options_, attempt, local_rank, error_file, inherited));
  // One reader of stdin at most, and none in the background of a terminal, where reading would stop it.
  const bool keep_stdin = !capture_ || (local_rank == 0 && ::isatty(STDIN_FILENO) == 0);
  ::unlink(error_file.c_str());
  ranks_.push_back({number, spawn({options_.command, environment, capture_, own_group_, keep_stdin}),
                    LineWriter(options_.out_fd, prefix), LineWriter(options_.err_fd, prefix), error_file});
  Rank& rank = ranks_.back();
  if (rank.child.pid > 0) return;
  rank.ended = true;
  RankEnd end;
  end.rank = number;
  end.exit_code = kCannotStart;
  end.message = "cannot start '" + options_.command.front() + "': " + std::strerror(rank.child.start_error);
  note_failures({end});
}

GroupResult ProcessGroup::run() {
  while (running() && !gave_up_) {
    wait_for_events();
    handle_signals();
    escalate();
  }
  finish();
  return result_;
}

bool ProcessGroup::running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.ended; });
}

int ProcessGroup::poll_timeout_ms() const {
  if (!stopping_) return -1;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(0, left) + 1);
}

void ProcessGroup::wait_for_events() {
  std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
  for (const auto& rank : ranks_)
    for (int fd : {rank.child.out.get(), rank.child.err.get()})
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
  if (::poll(fds.data(), fds.size(), poll_timeout_ms()) <= 0) return;
  for (auto& rank : ranks_)
    for (int fd : {rank.child.out.get(), rank.child.err.get()})
      if (std::any_of(fds.begin(), fds.end(), [&](const pollfd& p) { return p.fd == fd && p.revents != 0; }))
        read_output(rank, fd);
}

// Reads once, so that a rank that never stops writing does not starve the others.
void ProcessGroup::read_output(Rank& rank, int fd) {
  char buffer[16 * 1024];
  const ssize_t count = ::read(fd, buffer, sizeof buffer);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  const bool is_out = fd == rank.child.out.get();
  LineWriter& writer = is_out ? rank.out : rank.err;
  if (count > 0) return writer.feed({buffer, static_cast<size_t>(count)});
  writer.finish();
  (is_out ? rank.child.out : rank.child.err).reset();
}

void ProcessGroup::handle_signals() {
  bool child_changed = false;
  while (auto signal = signals_.next()) {
    if (signal->number == SIGCHLD) {
      child_changed = true;
    } else if (result_.interrupted_by != 0) {
      deadline_ = Clock::now();  // asked twice: no more grace
    } else {
      result_.interrupted_by = signal->number;
      // A Ctrl-C has reached a rank in the terminal's own group already.
      if (signal->from_terminal && !own_group_) {
        stopping_ = true;
        deadline_ = Clock::now() + options_.grace;
      } else {
        stop(signal->number);
      }
    }
  }
  if (child_changed) collect_ends();
}

// Ended ranks stay zombies until finish(): their pid, which is their group's id, can't be given to anybody else
// meanwhile.
void ProcessGroup::collect_ends() {
  std::vector<RankEnd> ends;
  for (auto& rank : ranks_) {
    siginfo_t info{};
    if (rank.ended || ::waitid(P_PID, static_cast<id_t>(rank.child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0)
      continue;
    if (info.si_pid == 0) continue;
    rank.ended = true;
    while (rank.child.err && is_readable(rank.child.err.get(), 0)) read_output(rank, rank.child.err.get());
    ends.push_back(end_of(rank, info.si_code, info.si_status));
  }
  note_failures(std::move(ends));
}

RankEnd ProcessGroup::end_of(const Rank& rank, int code, int status) const {
  RankEnd end;
  end.rank = rank.number;
  end.pid = rank.child.pid;
  (code == CLD_EXITED ? end.exit_code : end.signal) = status;
  if (auto message = read_error_file(rank.error_file)) {
    end.message = message->text;
    end.message_time_ns = message->time_ns;
  } else if (!rank.err.last_line().empty()) {
    end.message = "last line on stderr: " + rank.err.last_line();
  }
  return end;
}

void ProcessGroup::note_failures(std::vector<RankEnd> ends) {
  if (stopping_) {
    result_.stopped += static_cast<int>(ends.size());
    return;
  }
  std::erase_if(ends, [](const RankEnd& end) { return !end.failed(); });
  if (ends.empty()) return;
  std::sort(ends.begin(), ends.end(), is_earlier);
  result_.first_failure = ends.front();
  result_.later_failures.assign(ends.begin() + 1, ends.end());
  stop(SIGTERM);
}

void ProcessGroup::stop(int signal) {
  stopping_ = true;
  deadline_ = Clock::now() + options_.grace;
  signal_all(signal);
}

void ProcessGroup::escalate() {
  if (!stopping_ || Clock::now() < deadline_) return;
  if (killed_) {
    gave_up_ = true;
    return;
  }
  killed_ = true;
  deadline_ = Clock::now() + kAfterKill;
  signal_all(SIGKILL);
}

void ProcessGroup::signal_all(int signal) {
  for (const auto& rank : ranks_)
    if (!rank.ended || own_group_) kill_rank(rank.child.pid, signal, own_group_);
}

// Ends what the ranks left behind in their groups, writes the rest of their output, and reaps them.
void ProcessGroup::finish() {
  if (own_group_) signal_all(SIGKILL);
  const auto until = Clock::now() + kDrain;
  for (auto& rank : ranks_) {
    for (int fd : {rank.child.out.get(), rank.child.err.get()}) {
      auto is_open = [&] { return fd == rank.child.out.get() || fd == rank.child.err.get(); };
      while (fd >= 0 && is_open() && Clock::now() < until) {
        if (is_readable(fd, 50)) read_output(rank, fd);
      }
    }
    rank.out.finish();
    rank.err.finish();
    if (rank.child.pid <= 0) continue;
    if (rank.ended) {
      ::waitpid(rank.child.pid, nullptr, 0);
      rank.child.pid = -1;
    } else {
      result_.unkillable.push_back(rank.child.pid);
    }
  }
}

}  // namespace fsdpp::launcher

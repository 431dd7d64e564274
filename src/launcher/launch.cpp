#include "launcher/launch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <string>

#include "base/enforce.h"
#include "launcher/failure.h"
#include "launcher/port.h"
#include "launcher/process_group.h"

namespace fsdpp::launcher {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "fsdpp-run-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr)
      fail<Error>("fsdpp-run: cannot make folder {}: {}", pattern, std::strerror(errno));
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// On several nodes all launchers must agree on it without talking to each other.
std::string make_run_id(const LaunchOptions& options) {
  if (options.nnodes > 1) return fmt::format("{}:{}", options.master_addr, options.master_port);
  std::random_device random;
  return fmt::format("fsdpp-{}-{:08x}{:08x}", ::getpid(), random(), random());
}

void say(const LaunchOptions& options, const std::string& text) {
  write_all(options.err_fd, "fsdpp-run: " + text + "\n");
}

void report(const LaunchOptions& options, const GroupResult& result) {
  if (const auto& first = result.first_failure) {
    const auto process = first->pid > 0 ? fmt::format(" (pid {})", first->pid) : std::string{};
    say(options, fmt::format("rank {}{} failed first: {}", first->rank, process, describe(*first)));
    if (!first->message.empty()) say(options, fmt::format("rank {}: {}", first->rank, first->message));
    for (const auto& end : result.later_failures)
      say(options, fmt::format("then rank {}: {}", end.rank, describe(end)));
    if (result.stopped > 0)
      say(options, fmt::format("ended {} other rank{}", result.stopped, result.stopped == 1 ? "" : "s"));
  }
  for (int pid : result.unkillable)
    say(options, fmt::format("process {} did not end after SIGKILL; look at it by hand", pid));
}

GroupResult run_attempt(const LaunchOptions& options, Attempt attempt, const std::string& folder,
                        const SignalQueue& signals) {
  std::optional<PortReservation> reservation;
  if (attempt.master_port == 0) attempt.master_port = reservation.emplace().port();
  return ProcessGroup(options, attempt, folder, signals).run();
}

void check_master_port(const LaunchOptions& options) {
  if (options.master_port == 0 || options.node_rank != 0 || can_listen(options.master_port)) return;
  fail<ConfigError>(
      "--master-port {} is in use on this host. Try: another port, or on one node leave the flag out so that a free "
      "one is taken",
      options.master_port);
}

}  // namespace

int launch(const LaunchOptions& options) {
  check_master_port(options);
  const SignalQueue signals;
  const TemporaryFolder folder;
  Attempt attempt{.run_id = make_run_id(options),
                  .master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr,
                  .master_port = options.master_port};
  for (;; ++attempt.restart_count) {
    const auto result = run_attempt(options, attempt, folder.path(), signals);
    report(options, result);
    if (result.interrupted_by != 0) return 128 + result.interrupted_by;
    if (!result.first_failure) return 0;
    if (attempt.restart_count >= options.max_restarts) return result.first_failure->status();
    say(options,
        fmt::format("restarting all ranks of this node ({} of {})", attempt.restart_count + 1, options.max_restarts));
  }
}

}  // namespace fsdpp::launcher

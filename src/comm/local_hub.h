#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/failure.h"
#include "comm/op.h"

namespace fsdpp::comm {

/// The meeting point of one in-process communicator: each rank posts its operations; the last one to arrive carries the
/// operation out for all. Operations run one at a time, in issue order.
class LocalHub {
 public:
  LocalHub(std::string name, std::vector<int> world_ranks);

  /// Posts a rank's next operation. `drop`: it never arrives. Throws when the hub has failed.
  void post(int rank, Op op, bool drop);
  [[nodiscard]] bool done(uint64_t sequence);
  void wait(uint64_t sequence);
  /// The rank will post no more. What waits for it fails at once.
  void leave(int rank) noexcept;
  /// Fails every pending and later operation; returns when no operation touches the ranks' memory any more.
  void fail(CommErrc code, const std::string& text) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::vector<std::optional<Op>> ops;  // by rank
    size_t arrived = 0;
    Clock::time_point since{};
    std::chrono::milliseconds timeout{0};
  };
  struct Member {
    bool left = false;
    std::string last_issued;
  };

  Entry& entry(const Op& op);
  void check_agreement(const Entry& entry, int rank);
  void run_ready(std::unique_lock<std::mutex>& lock);
  void check_left();
  void check_deadline();
  [[nodiscard]] std::string waiting_for(const Entry& entry, bool only_left) const;
  void fail_locked(CommErrc code, const std::string& text) noexcept;
  void throw_if_failed(std::unique_lock<std::mutex>& lock);

  const std::string name_;
  const std::vector<int> world_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;  // front: sequence `executed_`
  std::vector<Member> members_;
  uint64_t executed_ = 0;
  Clock::time_point last_done_{};
  bool executing_ = false;
  Failure failure_;
};

/// Carries out one operation for all ranks; ops[r] belongs to rank r.
void execute_local(const std::vector<std::optional<Op>>& ops);

}  // namespace fsdpp::comm

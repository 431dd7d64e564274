#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdpp/profiler/records.h"

/// What host threads write down while a window is open. Each thread has a log of its own; its mutex is free except for the
/// moment in which the window is closed.
namespace fsdpp::profiler {

struct RawOp {
  std::string name;
  int64_t start_ns = 0;
  int64_t end_ns = 0;  ///< 0: still open
  int64_t sequence = -1;
  int64_t forward_thread = 0;
  CpuOp::Category category = CpuOp::Category::Op;
  size_t args_begin = 0;  ///< in `args`; see op_args.h
  size_t args_end = 0;
};

/// `end_ns` is when the issuing call returned; `op` "group" with sequence -1 is the launch of the collectives before it.
struct RawCollective {
  Collective collective;
  bool in_group = false;
};

/// One thread's records; operators and scopes in the order of their starts.
struct ThreadRecords {
  int64_t thread = 0;
  std::vector<RawOp> ops;
  std::vector<int64_t> args;
  std::vector<Scope> scopes;
  std::vector<RawCollective> collectives;
  std::vector<MemoryEvent> memory;
};

using HostRecords = std::vector<ThreadRecords>;

struct ThreadLog {
  std::mutex mutex;
  uint64_t window = 0;  ///< 0: nothing in it
  ThreadRecords records;
  std::vector<size_t> open_scopes;
  std::vector<size_t> open_collectives;
};

/// The logs of all threads of the process.
class HostLog {
 public:
  static HostLog& instance();

  /// Everything before is forgotten.
  void open() noexcept;
  /// Nothing is written after it; threads without a record are left out.
  [[nodiscard]] HostRecords close();

  /// Which window is open; 0: none.
  [[nodiscard]] uint64_t window() const noexcept { return window_.load(std::memory_order_acquire); }

  /// Runs `write(log)` on the calling thread's log if a window is open.
  template <class Write>
  void write(Write&& write) {
    const uint64_t window = this->window();
    if (window == 0) return;
    ThreadLog& log = mine();
    std::lock_guard lock(log.mutex);
    if (this->window() != window) return;  // closed in between
    if (log.window != window) reset(log, window);
    write(log);
  }

 private:
  ThreadLog& mine();
  static void reset(ThreadLog& log, uint64_t window);

  std::atomic<uint64_t> window_{0};
  uint64_t last_window_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<ThreadLog>> logs_;
};

/// The system's id of the calling thread, as CUPTI shows it.
[[nodiscard]] int64_t thread_id() noexcept;

}  // namespace fsdpp::profiler

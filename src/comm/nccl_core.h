#pragma once
#include <nccl.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/collective_use.h"
#include "comm/front.h"
#include "comm/nccl_record.h"
#include "comm/watchdog.h"

namespace fsdpp::comm {

/// The NCCL handle of one communicator and the operations in flight on it; shared with the watchdog.
class NcclCore final : public Watched, public std::enable_shared_from_this<NcclCore> {
 public:
  /// Collective. Throws CommError{InitTimeout} naming the ranks that did not come.
  NcclCore(const CommInfo& info, const Bootstrap& boot, std::shared_ptr<Failure> failure);

  /// A record for `op`, with `start` recorded on `stream`.
  [[nodiscard]] std::shared_ptr<NcclRecord> begin(Op op, cuda::StreamView stream);
  /// The NCCL call itself. Throws CommError{Backend}.
  void call(const Op& op, cuda::StreamView stream);
  void group_start();
  void group_end();
  /// Records `end`.
  void finish(NcclRecord& record, cuda::StreamView stream);
  /// Ends the communicator: destroys it, or with `now`, or after a failure, aborts it. Bounded in time.
  void close(bool now) noexcept;
  [[nodiscard]] bool busy();

  // Symmetric windows, in the order in which all ranks register them; close() ends them in that order. See nccl_buffers.h.
  /// Collective. Throws CommError{Backend}.
  void register_window(void* memory, size_t bytes);
  /// Ends the registration, if there is one. False: the memory must stay, an operation of the failed communicator may use it for ever.
  [[nodiscard]] bool drop_window(void* memory) noexcept;
  /// Equal on all ranks if they registered and freed the same windows.
  [[nodiscard]] int64_t registrations() const noexcept;
  /// Whether it lies in registered memory.
  [[nodiscard]] bool in_window(const void* data) const noexcept;

  // Watched
  [[nodiscard]] const std::string& key() const noexcept override { return key_; }
  void poll(Watchdog& dog) override;
  [[nodiscard]] Progress progress() const override;
  void fail(CommErrc code, const std::string& text) noexcept override;

 private:
  void connect(const Bootstrap& boot);
  [[nodiscard]] ncclUniqueId exchange_id(const Bootstrap& boot);
  [[noreturn]] void late(const Bootstrap& boot);
  void check(const char* call, ncclResult_t result);
  /// The handle, for a call; calls_ is one more. Throws the failure.
  [[nodiscard]] ncclComm_t enter();
  void abort_handle() noexcept;
  void drop_windows(ncclComm_t handle) noexcept;
  [[nodiscard]] bool has_windows() const noexcept;
  [[nodiscard]] bool comes_to_rest() noexcept;
  /// Waits on windows do not see the abort flag: ends the process if they hold up the abort, or outlast it.
  void end_if_stuck(bool aborted) noexcept;
  [[nodiscard]] std::shared_ptr<NcclRecord> oldest_pending();
  /// Both true while something seems wrong; report it once it was observed long enough.
  [[nodiscard]] bool poll_async_error(Watchdog& dog);
  [[nodiscard]] bool poll_time(Watchdog& dog, NcclRecord& record);
  [[nodiscard]] bool observed_long_enough(Watchdog& dog);
  [[nodiscard]] std::string silent_ranks(Watchdog& dog) const;
  void report_hang(Watchdog& dog, const NcclRecord& record, double seconds);

  const std::string name_, key_;
  const std::vector<int> ranks_;
  const int rank_;
  const c10::DeviceIndex device_;
  const bool watched_;
  const CommunicatorOptions options_;
  const CollectiveUse use_;
  std::shared_ptr<Failure> failure_;
  std::shared_ptr<NcclRecordPool> pool_ = std::make_shared<NcclRecordPool>();
  std::mutex handle_mutex_;  // taken only to look at or to take the handle away, never around a call that may block
  ncclComm_t handle_ = nullptr;
  std::atomic<int> calls_{0};  // threads inside NCCL with the handle
  struct Window {
    void* memory;
    size_t bytes;
    ncclWindow_t window;
    uint64_t id;
  };
  mutable std::mutex windows_mutex_;  // of the next two
  std::vector<Window> windows_;
  uint64_t registered_ = 0;
  mutable std::mutex mutex_;   // of what follows
  std::deque<std::shared_ptr<NcclRecord>> pending_;
  uint64_t issued_ = 0;
  Op last_;                                            // the last one issued
  std::chrono::steady_clock::time_point suspicion_{};  // the watchdog thread's own: since when something seems wrong
};

}  // namespace fsdpp::comm

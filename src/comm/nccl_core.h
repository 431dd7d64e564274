#pragma once
#include <nccl.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/front.h"
#include "comm/nccl_record.h"
#include "comm/watchdog.h"

namespace fsdpp::comm {

/// The NCCL handle of one communicator and the operations in flight on it; shared with the watchdog.
class NcclCore final : public Watched {
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
  void abort_handle() noexcept;
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
  std::shared_ptr<Failure> failure_;
  std::shared_ptr<NcclRecordPool> pool_ = std::make_shared<NcclRecordPool>();
  std::mutex handle_mutex_;  // taken only to look at or to take the handle away, never around a call that may block
  ncclComm_t handle_ = nullptr;
  std::atomic<int> calls_{0};  // threads inside NCCL with the handle
  mutable std::mutex mutex_;   // of what follows
  std::deque<std::shared_ptr<NcclRecord>> pending_;
  uint64_t issued_ = 0;
  Op last_;                                            // the last one issued
  std::chrono::steady_clock::time_point suspicion_{};  // the watchdog thread's own: since when something seems wrong
};

}  // namespace fsdpp::comm

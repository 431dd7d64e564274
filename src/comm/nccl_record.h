#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/failure.h"
#include "comm/op.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::comm {

/// One operation in flight: its events around the call, and what to say about it. Doubles as the ticket's state. Taken
/// from a pool and given back by its last owner, so that a step creates no events.
class NcclRecord final : public Ticket::State {
 public:
  bool query() const override;
  void wait(cuda::StreamView stream) const override;
  void wait_host() const override;

  Op op;                  // `in` and `out` are not used any more
  int group = 1;          ///< operations that this record stands for
  bool captured = false;  ///< issued into a CUDA graph: the events belong to the graph and must not be queried
  std::atomic<bool> issued{false};  ///< the call has returned and `end` is recorded
  cuda::Event start, end;
  std::chrono::steady_clock::time_point called{}, started{};  // `started`: as the watchdog saw it; zero: not yet
  std::shared_ptr<Failure> failure;

  /// "all_gather #12 'layers.7 forward'", with the size of its group.
  [[nodiscard]] std::string text() const;

 private:
  void check_host_use(const char* what) const;
};

class NcclRecordPool : public std::enable_shared_from_this<NcclRecordPool> {
 public:
  [[nodiscard]] std::shared_ptr<NcclRecord> take();

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<NcclRecord>> free_;
};

/// The ticket of a group that used several streams.
class NcclGroupTicket final : public Ticket::State {
 public:
  explicit NcclGroupTicket(std::vector<std::shared_ptr<NcclRecord>> records) : records_(std::move(records)) {}
  bool query() const override;
  void wait(cuda::StreamView stream) const override;
  void wait_host() const override;

 private:
  std::vector<std::shared_ptr<NcclRecord>> records_;
};

}  // namespace fsdpp::comm

#include "comm/nccl_record.h"

#include <algorithm>
#include <thread>

#include "base/enforce.h"

namespace fsdpp::comm {

std::string NcclRecord::text() const {
  return group == 1 ? short_name(op) : fmt::format("{} and {} more in one group", short_name(op), group - 1);
}

void NcclRecord::check_host_use(const char* what) const {
  failure->check();
  FSDPP_ENFORCE(!captured, UsageError,
                "{}: {} of an operation in a CUDA graph. Try: wait() on a stream, inside the capture", text(), what);
}

bool NcclRecord::query() const {
  check_host_use("query()");
  return end.query();
}

void NcclRecord::wait(cuda::StreamView stream) const {
  failure->check();
  stream.wait(end);
}

// Polls, so that a failure found by the watchdog is thrown even where the device never gets there.
void NcclRecord::wait_host() const {
  check_host_use("wait_host()");
  for (int spin = 0; !end.query(); ++spin) {
    failure->check();
    if (spin > 2000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  failure->check();
}

std::shared_ptr<NcclRecord> NcclRecordPool::take() {
  std::unique_ptr<NcclRecord> record;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      record = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!record) record = std::make_unique<NcclRecord>();
  record->group = 1;
  record->captured = false;
  record->issued = false;
  record->started = {};
  return {record.release(), [pool = shared_from_this()](NcclRecord* done) {
            done->failure.reset();
            std::lock_guard lock(pool->mutex_);
            pool->free_.emplace_back(done);
          }};
}

bool NcclGroupTicket::query() const {
  return std::all_of(records_.begin(), records_.end(), [](const auto& record) { return record->query(); });
}
void NcclGroupTicket::wait(cuda::StreamView stream) const {
  for (const auto& record : records_) record->wait(stream);
}
void NcclGroupTicket::wait_host() const {
  for (const auto& record : records_) record->wait_host();
}

}  // namespace fsdpp::comm

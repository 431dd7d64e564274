#include "comm/host_communicator.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "base/enforce.h"
#include "comm/host_algorithms.h"
#include "comm/host_connect.h"
#include "comm/watchdog.h"

namespace fsdpp::comm {
namespace {

/// Queue and worker of one communicator; shared with its tickets and the watchdog.
class HostCore final : public Watched {
 public:
  HostCore(const CommInfo& info, const Bootstrap& boot, std::shared_ptr<Failure> failure)
      : name_(info.name),
        key_(boot.key),
        store_(boot.store),
        failure_(std::move(failure)),
        wire_(info.name, info.rank, info.ranks, connect_members(info, boot)),
        algorithms_(wire_, info.rank, static_cast<int>(info.ranks.size()), [this] { return interrupted(); }) {}

  void start() {
    worker_ = std::thread([this] { work(); });
  }

  void push(Op op) {
    {
      std::lock_guard lock(mutex_);
      progress_.issued = op.sequence + 1;
      queue_.push_back(std::move(op));
    }
    changed_.notify_all();
  }

  bool done(uint64_t sequence) {
    std::lock_guard lock(mutex_);
    if (completed_ > sequence) return true;
    if (stopped_) failure_->check();
    return false;
  }

  void wait(uint64_t sequence) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ > sequence || stopped_; });
    if (completed_ <= sequence) failure_->check();
  }

  /// Lets queued operations finish unless `now`, then ends the worker.
  void close(bool now) noexcept {
    if (now) fail(CommErrc::Aborted, fmt::format("communicator '{}' was destroyed with operations pending", name_));
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  [[nodiscard]] bool idle() {
    std::lock_guard lock(mutex_);
    return queue_.empty();
  }

  // Watched
  [[nodiscard]] const std::string& key() const noexcept override { return key_; }
  void poll(Watchdog&) override {}
  [[nodiscard]] Progress progress() const override {
    std::lock_guard lock(mutex_);
    Progress result = progress_;
    result.oldest = completed_;
    if (!queue_.empty()) {
      result.last_issued = short_name(queue_.back());
      result.last_text = describe(queue_.back().sig, queue_.back().label);
      result.oldest_text = describe(queue_.front().sig, queue_.front().label);
      result.oldest_started = true;
    }
    return result;
  }
  void fail(CommErrc code, const std::string& text) noexcept override {
    failure_->set(code, text);
    {
      std::lock_guard lock(mutex_);  // the worker is either before its check of the failure, or waits
    }
    changed_.notify_all();
    wire_.wake();
  }

 private:
  std::optional<ExchangeFailure> interrupted() const {
    if (!failure_->failed()) return std::nullopt;
    return ExchangeFailure{failure_->code(), failure_->text()};
  }

  void work() {
    while (const Op* op = next()) {
      try {
        algorithms_.run(*op);
      } catch (const ExchangeFailure& failure) {
        return stop(failure);
      } catch (const std::exception& error) {
        return stop(
            {CommErrc::Backend, fmt::format("communicator '{}': {} failed: {}", name_, short_name(*op), error.what())});
      }
      std::lock_guard lock(mutex_);
      queue_.pop_front();
      ++completed_;
      changed_.notify_all();
    }
    if (failure_->failed()) stop({failure_->code(), failure_->text()});
  }

  // The next operation, which stays at the head of the queue while it runs; nullptr to end.
  const Op* next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !queue_.empty() || closing_ || failure_->failed(); });
    return queue_.empty() || failure_->failed() ? nullptr : &queue_.front();
  }

  void stop(ExchangeFailure failure) noexcept {
    if (failure.closed_by >= 0) take_reason(failure);
    failure_->set(failure.code, failure.text);
    try {
      store_->set(failed_key(), std::to_string(static_cast<int>(failure_->code())) + " " + failure_->text());
    } catch (...) {  // the store's server is gone
    }
    wire_.send_failure(failure_->code(), failure_->text());
    std::lock_guard lock(mutex_);
    queue_.clear();
    stopped_ = true;
    changed_.notify_all();
  }

  // A peer that fails in the middle of a message can only close the connection; its reason is in the store, or on its
  // way there.
  void take_reason(ExchangeFailure& failure) noexcept {
    try {
      const std::string reason = store_->get(failed_key(), std::chrono::milliseconds(200));
      const size_t cut = reason.find(' ');
      failure = {static_cast<CommErrc>(std::stoi(reason.substr(0, cut))), reason.substr(cut + 1)};
    } catch (...) {  // no reason: the peer was killed
    }
  }

  [[nodiscard]] std::string failed_key() const { return fmt::format("comm/{}/failed", key_); }

  const std::string name_, key_;
  std::shared_ptr<Store> store_;
  std::shared_ptr<Failure> failure_;
  HostWire wire_;
  HostAlgorithms algorithms_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Op> queue_;
  Progress progress_;
  uint64_t completed_ = 0;
  bool closing_ = false, stopped_ = false;
  std::thread worker_;
};

class HostTicket final : public Ticket::State {
 public:
  HostTicket(std::shared_ptr<HostCore> core, uint64_t sequence) : core_(std::move(core)), sequence_(sequence) {}
  bool query() const override { return core_->done(sequence_); }
  void wait(cuda::StreamView) const override { core_->wait(sequence_); }
  void wait_host() const override { core_->wait(sequence_); }

 private:
  std::shared_ptr<HostCore> core_;
  uint64_t sequence_;
};

class HostCommunicator final : public FrontCommunicator {
 public:
  HostCommunicator(CommInfo comm_info, const Bootstrap& boot) : FrontCommunicator(std::move(comm_info)) {
    if (size() == 1) return;
    core_ = std::make_shared<HostCore>(info(), boot, shared_failure());
    core_->start();
    if (boot.watchdog != nullptr) boot.watchdog->watch(core_);
  }
  ~HostCommunicator() override {
    if (core_) core_->close(std::uncaught_exceptions() > 0 && !core_->idle());
  }

 protected:
  Ticket issue(Op op, cuda::StreamView) override {
    const uint64_t sequence = op.sequence;
    core_->push(std::move(op));
    return Ticket(std::make_shared<HostTicket>(core_, sequence));
  }
  void issue_barrier(Op op) override { issue(std::move(op), {}).wait_host(); }
  void fail(CommErrc code, const std::string& text) noexcept override {
    FrontCommunicator::fail(code, text);
    if (core_) core_->fail(code, text);
  }

 private:
  std::shared_ptr<HostCore> core_;
};

}  // namespace

std::shared_ptr<Communicator> make_host_communicator(CommInfo info, const Bootstrap& bootstrap) {
  return std::make_shared<HostCommunicator>(std::move(info), bootstrap);
}

}  // namespace fsdpp::comm

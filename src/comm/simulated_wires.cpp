#include "comm/simulated_wires.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <thread>

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

class HostTicket final : public Ticket::State {
 public:
  HostTicket(Clock::time_point done, std::shared_ptr<Failure> failure) : done_(done), failure_(std::move(failure)) {}
  bool query() const override {
    failure_->check();
    return Clock::now() >= done_;
  }
  void wait(cuda::StreamView) const override { wait_host(); }
  void wait_host() const override {
    for (auto now = Clock::now(); now < done_; now = Clock::now()) {
      failure_->check();
      std::this_thread::sleep_for(std::min<Clock::duration>(done_ - now, std::chrono::milliseconds(5)));
    }
    failure_->check();
  }

 private:
  Clock::time_point done_;
  std::shared_ptr<Failure> failure_;
};

class HostWires final : public SimulatedWires {
 public:
  int add_user() override {
    const std::lock_guard lock(mutex_);
    use_.emplace_back();
    return static_cast<int>(use_.size()) - 1;
  }
  Ticket carry(const Load& load, cuda::StreamView, std::shared_ptr<Failure> failure) override {
    const std::lock_guard lock(mutex_);
    auto& use = use_.at(static_cast<size_t>(load.user));
    ++use.operations;
    use.bytes += load.bytes;
    use.seconds += load.seconds;
    if (!delays_) return ends(Clock::now(), std::move(failure));
    auto& free_at = free_at_.at(static_cast<size_t>(load.wire));
    free_at = std::max(free_at, Clock::now()) +
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(load.seconds));
    return ends(free_at, std::move(failure));
  }
  Ticket after(cuda::StreamView, std::shared_ptr<Failure> failure) override {
    return ends(Clock::now(), std::move(failure));
  }
  void set_delays(bool on) override {
    const std::lock_guard lock(mutex_);
    delays_ = on;
  }
  FabricUse use(int user) const override {
    const std::lock_guard lock(mutex_);
    return use_.at(static_cast<size_t>(user));
  }
  void reset_use() override {
    const std::lock_guard lock(mutex_);
    std::fill(use_.begin(), use_.end(), FabricUse{});
  }

 private:
  static Ticket ends(Clock::time_point at, std::shared_ptr<Failure> failure) {
    return Ticket(std::make_shared<HostTicket>(at, std::move(failure)));
  }

  mutable std::mutex mutex_;
  bool delays_ = true;
  std::array<Clock::time_point, 2> free_at_{};  ///< when a wire is done with what was issued
  std::vector<FabricUse> use_;
};

}  // namespace

std::shared_ptr<SimulatedWires> make_host_wires() { return std::make_shared<HostWires>(); }

}  // namespace fsdpp::comm

#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "support/forwarding_world.h"

namespace fsdpp::test {

/// Time that passes only when the test says so: computing advances it, a collective completes so many milliseconds after it could
/// start on its wire, and waiting for one moves the clock there. One for each rank, used on that rank's thread. CPU only.
///
/// Schedules become exact numbers: what overlaps costs nothing, what doesn't adds up. What ranks compare with each other takes no time.
struct VirtualTime {
  double now = 0;
  double gather = 0, reduce = 0;  ///< milliseconds on the wire
  bool one_wire = false;          ///< all communicators share one wire, as in PyTorch, in place of one each
  double waited = 0;              ///< of `now`, spent waiting for collectives

  void compute(double milliseconds) noexcept { now += milliseconds; }
  /// When a collective issued now on `communicator` completes.
  double issue(const std::string& communicator, double milliseconds) {
    auto& free_at = wires_[one_wire ? "" : communicator];
    free_at = std::max(free_at, now) + milliseconds;
    return free_at;
  }
  void wait_until(double time) noexcept {
    waited += std::max(0.0, time - now);
    now = std::max(now, time);
  }

 private:
  std::map<std::string, double> wires_;
};

/// Collectives of `inner`, done at once, whose tickets take virtual time.
class TimedCommunicator final : public ForwardingCommunicator {
 public:
  TimedCommunicator(std::shared_ptr<comm::Communicator> inner, std::shared_ptr<VirtualTime> time)
      : ForwardingCommunicator(std::move(inner)), time_(std::move(time)) {}
  comm::Ticket all_gather(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    return timed(ForwardingCommunicator::all_gather(out, in, s, i), time_->gather);
  }
  comm::Ticket reduce_scatter(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    return timed(ForwardingCommunicator::reduce_scatter(out, in, op, s, i), time_->reduce);
  }
  comm::Ticket all_reduce(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    return timed(ForwardingCommunicator::all_reduce(out, in, op, s, i), i.label == "step check" ? 0 : time_->reduce);  // which is a few bytes
  }

 private:
  struct Timed final : comm::Ticket::State {
    Timed(comm::Ticket t, std::shared_ptr<VirtualTime> v, double d) : ticket(std::move(t)), time(std::move(v)), done(d) {}
    bool query() const override { return time->now >= done && ticket.query(); }
    void wait(cuda::StreamView stream) const override {
      ticket.wait(stream);
      time->wait_until(done);
    }
    void wait_host() const override {
      ticket.wait_host();
      time->wait_until(done);
    }
    comm::Ticket ticket;
    std::shared_ptr<VirtualTime> time;
    double done;
  };
  comm::Ticket timed(comm::Ticket ticket, double milliseconds) {
    return comm::Ticket(std::make_shared<Timed>(std::move(ticket), time_, time_->issue(name(), milliseconds)));
  }

  std::shared_ptr<VirtualTime> time_;
};

class TimedWorld final : public ForwardingWorld {
 public:
  using ForwardingWorld::ForwardingWorld;

  std::shared_ptr<VirtualTime> time = std::make_shared<VirtualTime>();

 protected:
  std::shared_ptr<comm::Communicator> wrap(std::shared_ptr<comm::Communicator> inner) override {
    return std::make_shared<TimedCommunicator>(std::move(inner), time);
  }
};

}  // namespace fsdpp::test

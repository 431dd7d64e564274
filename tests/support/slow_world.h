#pragma once
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "support/forwarding_world.h"

namespace fsdpp::test {

/// Milliseconds of sleep queued on an operation's stream before it (CPU: of the calling thread).
struct Delays {
  double gather = 0;
  double reduce = 0;
};

/// A gather or reduction as it is asked of a communicator.
struct WireCall {
  std::string_view op;     ///< "all_gather", "reduce_scatter", "all_reduce"
  std::string_view label;  ///< unit or purpose
  int64_t count = 0;       ///< elements that this rank puts in
  c10::ScalarType dtype = c10::ScalarType::Float;
};
using Watch = std::function<void(const WireCall&)>;

/// A communicator that sleeps on the caller's stream first: a missing wait between streams then shows as a wrong value.
class SlowCommunicator final : public ForwardingCommunicator {
 public:
  SlowCommunicator(std::shared_ptr<comm::Communicator> inner, const Delays& delays, const Watch& watch)
      : ForwardingCommunicator(std::move(inner)), delays_(delays), watch_(watch) {}
  comm::Ticket all_gather(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    before("all_gather", delays_.gather, in, s, i);
    return ForwardingCommunicator::all_gather(out, in, s, i);
  }
  comm::Ticket reduce_scatter(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    before("reduce_scatter", delays_.reduce, in, s, i);
    return ForwardingCommunicator::reduce_scatter(out, in, op, s, i);
  }
  comm::Ticket all_reduce(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    before("all_reduce", delays_.reduce, in, s, i);
    return ForwardingCommunicator::all_reduce(out, in, op, s, i);
  }

 private:
  void before(std::string_view op, double delay, const comm::ConstBuffer& in, cuda::StreamView s, const comm::OpInfo& info) const {
    if (watch_) watch_({op, info.label, in.count, in.dtype});
    if (delay > 0) s.sleep(delay);
  }

  const Delays& delays_;
  const Watch& watch_;
};

/// A world whose communicators sleep as `delays` says at the time of the call, and tell `watch`.
class SlowWorld final : public ForwardingWorld {
 public:
  using ForwardingWorld::ForwardingWorld;

  Delays delays;
  Watch watch;

 protected:
  std::shared_ptr<comm::Communicator> wrap(std::shared_ptr<comm::Communicator> inner) override {
    return std::make_shared<SlowCommunicator>(std::move(inner), delays, watch);
  }
};

}  // namespace fsdpp::test

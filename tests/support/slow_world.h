#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "fsdpp/comm/world.h"

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
class SlowCommunicator final : public comm::Communicator {
 public:
  SlowCommunicator(std::shared_ptr<comm::Communicator> inner, const Delays& delays, const Watch& watch)
      : inner_(std::move(inner)), delays_(delays), watch_(watch) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  const std::string& name() const noexcept override { return inner_->name(); }
  c10::Device device() const noexcept override { return inner_->device(); }
  comm::Ticket all_gather(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    before("all_gather", delays_.gather, in, s, i);
    return inner_->all_gather(out, in, s, i);
  }
  comm::Ticket reduce_scatter(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    before("reduce_scatter", delays_.reduce, in, s, i);
    return inner_->reduce_scatter(out, in, op, s, i);
  }
  comm::Ticket all_reduce(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    before("all_reduce", delays_.reduce, in, s, i);
    return inner_->all_reduce(out, in, op, s, i);
  }
  comm::Ticket broadcast(comm::Buffer inout, int root, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->broadcast(inout, root, s, i);
  }
  comm::Ticket all_to_all(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->all_to_all(out, in, s, i);
  }
  void group_begin() override { inner_->group_begin(); }
  comm::Ticket group_end() override { return inner_->group_end(); }
  void barrier(const comm::OpInfo& i) override { inner_->barrier(i); }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }

 private:
  void before(std::string_view op, double delay, const comm::ConstBuffer& in, cuda::StreamView s, const comm::OpInfo& info) const {
    if (watch_) watch_({op, info.label, in.count, in.dtype});
    if (delay > 0) s.sleep(delay);
  }

  std::shared_ptr<comm::Communicator> inner_;
  const Delays& delays_;
  const Watch& watch_;
};

/// A world whose communicators sleep as `delays` says at the time of the call, and tell `watch`.
class SlowWorld final : public comm::World {
 public:
  explicit SlowWorld(std::shared_ptr<comm::World> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  int local_rank() const noexcept override { return inner_->local_rank(); }
  c10::Device device() const noexcept override { return inner_->device(); }
  const std::string& launcher() const noexcept override { return inner_->launcher(); }
  comm::Store& store() noexcept override { return inner_->store(); }
  std::shared_ptr<comm::Communicator> make_communicator(const std::string& name, std::vector<int> ranks) override {
    return std::make_shared<SlowCommunicator>(inner_->make_communicator(name, std::move(ranks)), delays, watch);
  }
  void barrier() override { inner_->barrier(); }

  Delays delays;
  Watch watch;

 private:
  std::shared_ptr<comm::World> inner_;
};

}  // namespace fsdpp::test

#pragma once
#include <memory>
#include <string>
#include <utility>

#include "fsdpp/comm/world.h"

namespace fsdpp::test {

/// A communicator that passes every call on; derived ones change what they need to.
class ForwardingCommunicator : public comm::Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<comm::Communicator> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  const std::string& name() const noexcept override { return inner_->name(); }
  c10::Device device() const noexcept override { return inner_->device(); }
  comm::Ticket all_gather(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->all_gather(out, in, s, adjust(i));
  }
  comm::Ticket reduce_scatter(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->reduce_scatter(out, in, op, s, adjust(i));
  }
  comm::Ticket all_reduce(comm::Buffer out, comm::ConstBuffer in, comm::ReduceOp op, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->all_reduce(out, in, op, s, adjust(i));
  }
  comm::Ticket broadcast(comm::Buffer inout, int root, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->broadcast(inout, root, s, adjust(i));
  }
  comm::Ticket all_to_all(comm::Buffer out, comm::ConstBuffer in, cuda::StreamView s, const comm::OpInfo& i) override {
    return inner_->all_to_all(out, in, s, adjust(i));
  }
  void group_begin() override { inner_->group_begin(); }
  comm::Ticket group_end() override { return inner_->group_end(); }
  void barrier(const comm::OpInfo& i) override { inner_->barrier(i); }
  comm::Allocation allocate(int64_t bytes, const comm::OpInfo& i) override { return inner_->allocate(bytes, i); }
  void abort(const std::string& why) noexcept override { inner_->abort(why); }

 protected:
  /// What the inner communicator is told about an operation.
  [[nodiscard]] virtual comm::OpInfo adjust(const comm::OpInfo& info) const { return info; }

 private:
  std::shared_ptr<comm::Communicator> inner_;
};

/// A world that wraps each of its communicators.
class ForwardingWorld : public comm::World {
 public:
  explicit ForwardingWorld(std::shared_ptr<comm::World> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  int local_rank() const noexcept override { return inner_->local_rank(); }
  c10::Device device() const noexcept override { return inner_->device(); }
  const std::string& launcher() const noexcept override { return inner_->launcher(); }
  comm::Store& store() noexcept override { return inner_->store(); }
  std::shared_ptr<comm::Communicator> make_communicator(const std::string& name, std::vector<int> ranks = {},
                                                        const comm::CommunicatorOptions& options = {}) override {
    return wrap(inner_->make_communicator(name, std::move(ranks), options));
  }
  void barrier() override { inner_->barrier(); }

 protected:
  [[nodiscard]] virtual std::shared_ptr<comm::Communicator> wrap(std::shared_ptr<comm::Communicator> inner) = 0;

 private:
  std::shared_ptr<comm::World> inner_;
};

/// Hides labels: like NCCL, the back end then sees no difference between operations of equal size.
class UnlabelledCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

 protected:
  comm::OpInfo adjust(const comm::OpInfo& info) const override { return {.label = {}, .timeout = info.timeout}; }
};
class UnlabelledWorld final : public ForwardingWorld {
 public:
  using ForwardingWorld::ForwardingWorld;

 protected:
  std::shared_ptr<comm::Communicator> wrap(std::shared_ptr<comm::Communicator> inner) override {
    return std::make_shared<UnlabelledCommunicator>(std::move(inner));
  }
};

}  // namespace fsdpp::test

#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/failure.h"
#include "comm/op.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

struct CommInfo {
  std::string name;
  std::vector<int> ranks;  ///< world ranks of the members, sorted
  int rank = 0;            ///< this rank's index in `ranks`
  c10::Device device{c10::kCPU};
  std::chrono::milliseconds timeout{0};  ///< default of an operation
  CommunicatorOptions options = {};
  bool assume_windows = false;  ///< for tests of NCCL: register memory without asking whether anything will use it
};

/// What all back ends share: checks of arguments, numbering, groups, size-1 communicators (a copy, or nothing), and the
/// rule that the first failure is thrown again by every later call.
class FrontCommunicator : public Communicator {
 public:
  explicit FrontCommunicator(CommInfo info) : info_(std::move(info)), failure_(std::make_shared<Failure>()) {}

  [[nodiscard]] int rank() const noexcept final { return info_.rank; }
  [[nodiscard]] int size() const noexcept final { return static_cast<int>(info_.ranks.size()); }
  [[nodiscard]] const std::string& name() const noexcept final { return info_.name; }
  [[nodiscard]] c10::Device device() const noexcept final { return info_.device; }

  Ticket all_gather(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info) final;
  Ticket reduce_scatter(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream, const OpInfo& info) final;
  Ticket all_reduce(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream, const OpInfo& info) final;
  Ticket broadcast(Buffer inout, int root, cuda::StreamView stream, const OpInfo& info) final;
  Ticket all_to_all(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info) final;
  void group_begin() final;
  Ticket group_end() final;
  void barrier(const OpInfo& info) final;
  Allocation allocate(int64_t bytes, const OpInfo& info) final;
  void abort(const std::string& why) noexcept final;

 protected:
  /// Starts one operation of a communicator with at least two ranks.
  virtual Ticket issue(Op op, cuda::StreamView stream) = 0;
  /// Host barrier among at least two ranks.
  virtual void issue_barrier(Op op) = 0;
  virtual void open_group() {}
  /// `last`: the ticket of the last operation inside.
  virtual Ticket close_group(Ticket last) { return last; }
  /// Copy for a communicator of one rank.
  virtual Ticket copy(const Op& op, cuda::StreamView stream);
  /// Makes pending operations fail; `text` is the message. Thread-safe, bounded in time.
  virtual void fail(CommErrc code, const std::string& text) noexcept { failure_->set(code, text); }
  virtual void check_dtype(const Signature& sig) const;

  // The steps of allocate() among at least two ranks; the first and the last are collective.
  /// Finds out, at first use, which kind of memory there is.
  virtual void prepare_buffers(const OpInfo& info);
  /// Memory of this rank, not registered yet; without data if none is left.
  [[nodiscard]] virtual Allocation reserve(int64_t bytes) { return plain_memory(bytes); }
  /// A number that is equal on all ranks if the same buffers are registered.
  [[nodiscard]] virtual int64_t registrations() const noexcept { return 0; }
  virtual void enlist(Allocation&) {}
  /// All ranks' numbers by rank. Collective, blocks the host.
  virtual void gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo& info);
  [[nodiscard]] Allocation plain_memory(int64_t bytes) const noexcept;

  [[nodiscard]] const CommInfo& info() const noexcept { return info_; }
  [[nodiscard]] Failure& failure() const noexcept { return *failure_; }
  [[nodiscard]] const std::shared_ptr<Failure>& shared_failure() const noexcept { return failure_; }
  [[nodiscard]] uint64_t issued() const noexcept { return next_; }
  Op make_op(const Signature& sig, void* out, const void* in, const OpInfo& info);

 private:
  Ticket start(Signature sig, Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info);
  Ticket finish(Ticket ticket);  // kept for the group that is open, if one is

  CommInfo info_;
  std::shared_ptr<Failure> failure_;
  uint64_t next_ = 0;
  bool in_group_ = false;
  Ticket group_last_;
};

}  // namespace fsdpp::comm

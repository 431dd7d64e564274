#include "comm/simulated_communicator.h"

#include <algorithm>
#include <thread>

#include "base/enforce.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

class CpuTicket final : public Ticket::State {
 public:
  CpuTicket(Clock::time_point done, std::shared_ptr<Failure> failure) : done_(done), failure_(std::move(failure)) {}
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

class StreamTicket final : public Ticket::State {
 public:
  StreamTicket(cuda::StreamView stream, std::shared_ptr<Failure> failure)
      : captured_(stream.is_capturing()), failure_(std::move(failure)) {
    end_.record(stream);
  }
  bool query() const override {
    check_host_use("query()");
    return end_.query();
  }
  void wait(cuda::StreamView stream) const override {
    failure_->check();
    stream.wait(end_);
  }
  void wait_host() const override {
    check_host_use("wait_host()");
    end_.synchronize();
  }

 private:
  void check_host_use(const char* what) const {
    failure_->check();
    FSDPP_ENFORCE(!captured_, UsageError, "{} of an operation in a CUDA graph. Try: wait() on a stream, inside the capture",
                  what);
  }

  cuda::Event end_;
  bool captured_;
  std::shared_ptr<Failure> failure_;
};

// `parts` times the first part.
void repeat(char* data, int64_t part, int64_t parts, cuda::StreamView stream) {
  for (int64_t filled = 1; filled < parts; filled *= 2)
    stream.copy(data + filled * part, data, std::min(filled, parts - filled) * part);
}

void copy_unless_there(void* out, const void* in, int64_t bytes, cuda::StreamView stream) {
  if (out != in && bytes > 0) stream.copy(out, in, bytes);
}

}  // namespace

SimulatedCommunicator::SimulatedCommunicator(CommInfo info, const FabricLink& link, std::shared_ptr<SimulatedState> state)
    : FrontCommunicator(std::move(info)), link_(link), state_(std::move(state)) {}

int64_t SimulatedCommunicator::whole_bytes(const Op& op) const {
  const auto in = static_cast<int64_t>(op.in_bytes());
  return op.sig.kind == OpKind::AllGather ? in * size() : in;
}

double SimulatedCommunicator::seconds_of(const Op& op) const {
  switch (op.sig.kind) {
    case OpKind::AllReduce:
      return link_.all_reduce(whole_bytes(op), size());
    case OpKind::Broadcast:
      return link_.broadcast(whole_bytes(op), size());
    default:
      return link_.gather(whole_bytes(op), size());
  }
}

void SimulatedCommunicator::move(const Op& op, cuda::StreamView stream) const {
  const auto in = static_cast<int64_t>(op.in_bytes());
  switch (op.sig.kind) {
    case OpKind::AllGather:
    case OpKind::AllToAll: {
      const int64_t part = op.sig.kind == OpKind::AllGather ? in : in / size();
      copy_unless_there(op.out, op.in, part, stream);
      if (part > 0) repeat(static_cast<char*>(op.out), part, size(), stream);
      return;
    }
    case OpKind::ReduceScatter:
      return copy_unless_there(op.out, op.in, in / size(), stream);
    default:
      return copy_unless_there(op.out, op.in, in, stream);
  }
}

Ticket SimulatedCommunicator::ticket(double seconds, cuda::StreamView stream) {
  if (stream.is_cuda()) {
    if (seconds > 0) stream.sleep(seconds * 1e3);
    return Ticket(std::make_shared<StreamTicket>(stream, shared_failure()));
  }
  free_at_ =
      std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return Ticket(std::make_shared<CpuTicket>(free_at_, shared_failure()));
}

Ticket SimulatedCommunicator::issue(Op op, cuda::StreamView stream) {
  const double seconds = seconds_of(op);
  auto& use = state_->use[name()];
  ++use.operations;
  use.bytes += whole_bytes(op);
  use.seconds += seconds;
  move(op, stream);
  return ticket(state_->delays ? seconds : 0, stream);
}

// The other ranks agree with this one.
void SimulatedCommunicator::gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo&) {
  for (auto out = all.begin(); out != all.end(); out += std::ssize(mine)) std::copy(mine.begin(), mine.end(), out);
}

Ticket SimulatedCommunicator::copy(const Op& op, cuda::StreamView stream) {
  copy_unless_there(op.out, op.in, static_cast<int64_t>(op.in_bytes()), stream);
  return ticket(0, stream);
}

}  // namespace fsdpp::comm

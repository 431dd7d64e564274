#include "comm/local_communicator.h"

#include <exception>

#include "base/enforce.h"

namespace fsdpp::comm {
namespace {

class HubTicket final : public Ticket::State {
 public:
  HubTicket(std::shared_ptr<LocalHub> hub, uint64_t sequence) : hub_(std::move(hub)), sequence_(sequence) {}
  bool query() const override { return hub_->done(sequence_); }
  void wait(cuda::StreamView) const override { hub_->wait(sequence_); }
  void wait_host() const override { hub_->wait(sequence_); }

 private:
  std::shared_ptr<LocalHub> hub_;
  uint64_t sequence_;
};

}  // namespace

LocalCommunicator::LocalCommunicator(CommInfo info, std::shared_ptr<LocalHub> hub,
                                     std::function<Fault(const OperationEvent&)> on_operation)
    : FrontCommunicator(std::move(info)), hub_(std::move(hub)), on_operation_(std::move(on_operation)) {}

LocalCommunicator::~LocalCommunicator() {
  try {
    if (size() > 1 && issued() > 0 && std::uncaught_exceptions() == 0 && !failure().failed()) hub_->wait(issued() - 1);
  } catch (...) {  // whoever holds a ticket sees it there
  }
  hub_->leave(rank());
}

Fault LocalCommunicator::ask_fault(const Op& op) const {
  if (!on_operation_) return Fault::None;
  return on_operation_({name(), std::string(name_of(op.sig.kind)), op.label, info().ranks[static_cast<size_t>(rank())],
                        op.sequence, op.sig.count});
}

Ticket LocalCommunicator::issue(Op op, cuda::StreamView) {
  const Fault fault = ask_fault(op);
  if (fault == Fault::Throw) {
    failure().set(CommErrc::Injected, fmt::format("communicator '{}': injected failure in {}", name(), short_name(op)));
    failure().check();
  }
  if (fault == Fault::Mismatch) ++op.sig.count;
  const uint64_t sequence = op.sequence;
  hub_->post(rank(), std::move(op), fault == Fault::Drop);
  return Ticket(std::make_shared<HubTicket>(hub_, sequence));
}

void LocalCommunicator::issue_barrier(Op op) { issue(std::move(op), {}).wait_host(); }

void LocalCommunicator::fail(CommErrc code, const std::string& text) noexcept {
  hub_->fail(code, text);
  FrontCommunicator::fail(code, text);
}

}  // namespace fsdpp::comm

#pragma once
#include <functional>
#include <memory>

#include "comm/front.h"
#include "comm/local_hub.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// One rank's end of an in-process communicator.
class LocalCommunicator final : public FrontCommunicator {
 public:
  LocalCommunicator(CommInfo info, std::shared_ptr<LocalHub> hub,
                    std::function<Fault(const OperationEvent&)> on_operation);
  ~LocalCommunicator() override;

 protected:
  Ticket issue(Op op, cuda::StreamView stream) override;
  void issue_barrier(Op op) override;
  void fail(CommErrc code, const std::string& text) noexcept override;

 private:
  [[nodiscard]] Fault ask_fault(const Op& op) const;

  std::shared_ptr<LocalHub> hub_;
  std::function<Fault(const OperationEvent&)> on_operation_;
};

}  // namespace fsdpp::comm

#pragma once
#include <memory>

#include "comm/front.h"
#include "comm/simulated_wires.h"
#include "fsdpp/comm/simulated_world.h"

namespace fsdpp::comm {

/// Rank 0 of a communicator whose other ranks do not exist; see SimulatedWorld.
class SimulatedCommunicator final : public FrontCommunicator {
 public:
  /// `user`: from wires->add_user().
  SimulatedCommunicator(CommInfo info, const FabricRing& ring, std::shared_ptr<SimulatedWires> wires, int user);

 protected:
  Ticket issue(Op op, cuda::StreamView stream) override;
  void issue_barrier(Op) override {}
  void gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo& info) override;
  Ticket copy(const Op& op, cuda::StreamView stream) override;

 private:
  [[nodiscard]] double seconds_of(const Op& op) const;
  [[nodiscard]] int64_t whole_bytes(const Op& op) const;
  void move(const Op& op, cuda::StreamView stream) const;

  FabricRing ring_;
  std::shared_ptr<SimulatedWires> wires_;
  int user_;
};

}  // namespace fsdpp::comm

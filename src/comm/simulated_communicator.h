#pragma once
#include <atomic>
#include <memory>

#include "comm/front.h"
#include "fsdpp/comm/simulated_world.h"

namespace fsdpp::comm {

/// What the communicators of one simulated world share.
struct SimulatedState {
  std::atomic<bool> delays{true};
  std::map<std::string, FabricUse> use;
};

/// Rank 0 of a communicator whose other ranks do not exist; see SimulatedWorld.
class SimulatedCommunicator final : public FrontCommunicator {
 public:
  SimulatedCommunicator(CommInfo info, const FabricLink& link, std::shared_ptr<SimulatedState> state);

 protected:
  Ticket issue(Op op, cuda::StreamView stream) override;
  void issue_barrier(Op) override {}
  void gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo& info) override;
  Ticket copy(const Op& op, cuda::StreamView stream) override;

 private:
  using Clock = std::chrono::steady_clock;
  [[nodiscard]] double seconds_of(const Op& op) const;
  [[nodiscard]] int64_t whole_bytes(const Op& op) const;
  void move(const Op& op, cuda::StreamView stream) const;
  [[nodiscard]] Ticket ticket(double seconds, cuda::StreamView stream);

  FabricLink link_;
  std::shared_ptr<SimulatedState> state_;
  Clock::time_point free_at_{};  // CPU: when the wire is done with what was issued
};

}  // namespace fsdpp::comm

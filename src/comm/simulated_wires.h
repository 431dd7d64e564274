#pragma once
#include <memory>

#include "comm/failure.h"
#include "fsdpp/comm/communicator.h"
#include "fsdpp/comm/simulated_world.h"

namespace fsdpp::comm {

/// The wires of a simulated world: what is within a node, and what is between nodes. Operations on one wire follow each
/// other.
class SimulatedWires {
 public:
  enum class Wire { Within, Between };
  struct Load {
    Wire wire = Wire::Within;
    int user = 0;  ///< from add_user()
    int64_t bytes = 0;
    double seconds = 0;
  };
  virtual ~SimulatedWires() = default;

  /// Something whose loads are counted apart.
  virtual int add_user() = 0;
  /// The end of what `stream` has got and, after that, of the load. CUDA: can be captured.
  [[nodiscard]] virtual Ticket carry(const Load& load, cuda::StreamView stream, std::shared_ptr<Failure> failure) = 0;
  /// The end of what `stream` has got.
  [[nodiscard]] virtual Ticket after(cuda::StreamView stream, std::shared_ptr<Failure> failure) = 0;
  /// The rest waits for the device: it belongs to all work before, not to any after.
  virtual void set_delays(bool on) = 0;
  [[nodiscard]] virtual FabricUse use(int user) const = 0;
  virtual void reset_use() = 0;
};

[[nodiscard]] std::shared_ptr<SimulatedWires> make_host_wires();
/// For builds with CUDA.
[[nodiscard]] std::shared_ptr<SimulatedWires> make_device_wires(c10::Device device);

}  // namespace fsdpp::comm

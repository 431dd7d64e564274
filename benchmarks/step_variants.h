#pragma once
// The ways to take a training step that bench_step compares.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data.h"
#include "options.h"
#include "place.h"

namespace bench {

/// A model with its optimizer.
class Stepper {
 public:
  virtual ~Stepper() = default;
  /// Queues one optimizer step on `batch`. Returns the loss, a scalar on the device that holds until the next step. Collective
  /// where the variant is sharded.
  virtual at::Tensor step(const minillm::Batch& batch) = 0;
  /// Device memory that LibTorch's allocator does not count.
  [[nodiscard]] virtual int64_t registered_bytes() const { return 0; }
};

struct Setup {
  const minillm::Options& options;
  const minillm::Place& place;  ///< with a mesh
  const minillm::Batch& batch;  ///< one to capture with; steps on it may be taken
};

struct Variant {
  std::string name, what;
  bool sharded = false;  ///< else every rank trains alone
  bool only_by_name = false;  ///< not among those that run by default
  bool cuda_only = false;
  int steps_when_made = 0;  ///< optimizer steps that `make` takes on the way, so that losses don't start at the first
  std::function<std::unique_ptr<Stepper>(const Setup&)> make;
};

/// All of them, in the order in which they are run by default.
[[nodiscard]] const std::vector<Variant>& step_variants();
/// Throws fsdpp::ConfigError naming the known ones.
[[nodiscard]] const Variant& step_variant(const std::string& name);

}  // namespace bench

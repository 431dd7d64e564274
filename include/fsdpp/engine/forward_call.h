#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "fsdpp/base/export.h"

namespace torch::nn {
class Module;
}

namespace fsdpp::engine {

class Unit;

/// One call of a module through its unit: what the holders of api/module_holder.h wrap around `forward`.
///
/// Construction finds the module's unit (none: everything below is a no-op). Order: enter(), input() for each tensor argument,
/// forward, output() for each tensor of the result, leave(). If the scope ends without leave() (an exception), the unit is
/// left sharded.
class FSDPP_API ForwardCall {
 public:
  explicit ForwardCall(const torch::nn::Module& module);
  ~ForwardCall();
  ForwardCall(const ForwardCall&) = delete;
  ForwardCall& operator=(const ForwardCall&) = delete;

  /// False when the module belongs to no unit.
  [[nodiscard]] bool sharded() const noexcept { return unit_ != nullptr; }
  /// False when input() changes nothing: arguments need not be visited.
  [[nodiscard]] bool casts_inputs() const noexcept { return casts_inputs_; }
  /// Pre-forward: gathers the unit (waits on the current stream), shows the gathered parameters, gathers ahead. Collective.
  void enter();
  /// Whether input() changes this tensor.
  [[nodiscard]] bool changes(const at::Tensor& tensor) const;
  /// Moves a tensor from the CPU to the unit's GPU (scalars stay) and casts a floating-point one to the policy's param_dtype.
  void input(at::Tensor& tensor) const;
  /// Casts to output_dtype and arms the unit's pre-backward.
  void output(at::Tensor& tensor);
  /// Post-forward: hides the gathered parameters and gives their memory back where the policy says so.
  void leave();

 private:
  [[nodiscard]] bool moves(const at::Tensor& tensor) const;
  [[nodiscard]] bool casts(const at::Tensor& tensor) const;
  const torch::nn::Module* module_;
  std::shared_ptr<Unit> unit_;
  bool casts_inputs_ = false;
  bool entered_ = false;
  bool will_backward_ = false;
};

}  // namespace fsdpp::engine

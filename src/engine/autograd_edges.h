#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

namespace torch::autograd {
struct Node;
}

namespace fsdpp::engine {

class FlatBuffer;
class Unit;

/// [Note: Ownership] A parameter's autograd metadata owns its hooks, and those own the unit; the unit holds its parameters
/// weakly. So a unit lives exactly as long as one of its parameters, wherever the user keeps it (module, optimizer, a copy).

/// Hooks a parameter for life: after its gradient was accumulated. (LibTorch's hooks on the tensor itself are the user's.)
void hook_parameter(const at::Tensor& handle, const std::shared_ptr<Unit>& unit, FlatBuffer& buffer, size_t index);

/// The node that accumulates the parameter's gradient, hooked to put the sharded .grad aside first: `hooked`, if there is one from
/// an earlier call, else a new one for what the handle shows now. The handle uses it while somebody holds it.
[[nodiscard]] std::shared_ptr<torch::autograd::Node> hooked_accumulator(const at::Tensor& handle,
                                                                        const std::shared_ptr<torch::autograd::Node>& hooked,
                                                                        const std::shared_ptr<Unit>& unit, FlatBuffer& buffer, size_t index);

/// A parameter by its place in its unit.
struct ParamPlace {
  std::shared_ptr<Unit> unit;
  FlatBuffer* buffer = nullptr;
  size_t index = 0;
};
/// The parameter whose gradient goes where the gradient of `leaf` goes: `leaf` itself, or the parameter that autograd saved it
/// from (recomputation gives back a new tensor, with the parameter's accumulator). Without a unit if there is none.
[[nodiscard]] ParamPlace accumulated_parameter(const at::Tensor& leaf);

/// Runs the unit's pre-backward when the gradient of `output` arrives. REQUIRES: output.requires_grad().
void hook_output(const at::Tensor& output, const std::shared_ptr<Unit>& unit);

}  // namespace fsdpp::engine

#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdpp::engine {

class FlatBuffer;
class Unit;

/// [Note: Ownership] A parameter's autograd metadata owns its hooks, and those own the unit; the unit holds its parameters
/// weakly. So a unit lives exactly as long as one of its parameters, wherever the user keeps it (module, optimizer, a copy).

/// Hooks a parameter for life: before its gradient is accumulated (the sharded .grad is put aside) and after.
void hook_parameter(const at::Tensor& handle, const std::shared_ptr<Unit>& unit, FlatBuffer& buffer, size_t index);

/// Runs the unit's pre-backward when the gradient of `output` arrives. REQUIRES: output.requires_grad().
void hook_output(const at::Tensor& output, const std::shared_ptr<Unit>& unit);

}  // namespace fsdpp::engine

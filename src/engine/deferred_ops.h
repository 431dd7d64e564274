#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace fsdpp::engine {

/// Whether an argument of the operator has recorded steps.
[[nodiscard]] bool reads_recorded(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Operators that write no element of their `self`, though their schema says so (requires_grad_, detach_, t_, …).
[[nodiscard]] bool changes_metadata_only(const c10::OperatorHandle& op);

/// Runs the operator below the guard's key and records what it does to meta tensors. `deferring`: factories without tensor
/// arguments make their tensor on the meta device, unless another device than the CPU was named. See [Note: Deferred initialisation].
void run_recorded(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, bool deferring);

}  // namespace fsdpp::engine

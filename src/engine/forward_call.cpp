#include "fsdpp/engine/forward_call.h"

#include <ATen/core/grad_mode.h>

#include "engine/autograd_edges.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

void cast_to(at::Tensor& tensor, c10::ScalarType dtype) {
  if (tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype) tensor = tensor.to(dtype);
}

}  // namespace

ForwardCall::ForwardCall(const torch::nn::Module& module) : module_(&module), unit_(find_unit(&module)) {
  if (!unit_) return;
  auto& policy = unit_->policy();
  casts_inputs_ = (policy.cast_forward_inputs && policy.param_dtype) || unit_->context().mesh().device().is_cuda();
}

ForwardCall::~ForwardCall() {
  if (!entered_) return;
  try {  // forward threw: leave the unit sharded
    unit_->abandon_forward();
    unit_->context().leave_forward();
  } catch (...) {
  }
}

void ForwardCall::enter() {
  unit_->context().enter_forward(*unit_);
  entered_ = true;
  unit_->pre_forward();
}

void ForwardCall::input(at::Tensor& tensor) const {
  if (!tensor.defined()) return;
  auto device = unit_->context().mesh().device();
  if (device.is_cuda() && tensor.device().is_cpu() && tensor.dim() > 0) tensor = tensor.to(device, /*non_blocking=*/true);
  auto& policy = unit_->policy();
  if (policy.cast_forward_inputs && policy.param_dtype) cast_to(tensor, *policy.param_dtype);
}

void ForwardCall::output(at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (unit_->policy().output_dtype) cast_to(tensor, *unit_->policy().output_dtype);
  if (!c10::GradMode::is_enabled() || !tensor.requires_grad()) return;
  will_backward_ = true;
  hook_output(tensor, unit_);
}

void ForwardCall::leave() {
  entered_ = false;
  unit_->post_forward(module_, will_backward_);
  unit_->context().leave_forward();
}

}  // namespace fsdpp::engine

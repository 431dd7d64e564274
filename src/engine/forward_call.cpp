#include "fsdpp/engine/forward_call.h"

#include <ATen/core/grad_mode.h>

#include "engine/autograd_edges.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp::engine {

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

bool ForwardCall::moves(const at::Tensor& tensor) const {
  return unit_->context().mesh().device().is_cuda() && tensor.device().is_cpu() && tensor.dim() > 0;
}

bool ForwardCall::casts(const at::Tensor& tensor) const {
  auto& policy = unit_->policy();
  return policy.cast_forward_inputs && policy.param_dtype && tensor.is_floating_point() && tensor.scalar_type() != *policy.param_dtype;
}

bool ForwardCall::changes(const at::Tensor& tensor) const { return tensor.defined() && (moves(tensor) || casts(tensor)); }

void ForwardCall::input(at::Tensor& tensor) const {
  if (!tensor.defined()) return;
  if (moves(tensor)) tensor = tensor.to(unit_->context().mesh().device(), /*non_blocking=*/true);
  if (casts(tensor)) tensor = tensor.to(*unit_->policy().param_dtype);
}

void ForwardCall::output(at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (auto dtype = unit_->policy().output_dtype; dtype && tensor.is_floating_point()) tensor = tensor.to(*dtype);
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

#include "fsdpp/optim/optimizer.h"

#include <torch/nn/module.h>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "optim/flat_optimizer.h"

namespace fsdpp::optim {

Optimizer::Optimizer(std::unique_ptr<FlatOptimizer> impl) : impl_(std::move(impl)) {}
Optimizer::~Optimizer() { impl_->retire(); }

void Optimizer::step(double grad_scale) { impl_->step(grad_scale); }
void Optimizer::step_in_backward(const torch::nn::Module& model) {
  const auto units = engine::find_units(model);
  FSDPP_ENFORCE(!units.empty(), UsageError,
                "step_in_backward: expected a model with units, got one without. Try: fully_shard first");
  for (const auto& unit : units) unit->step_by(impl_);
}

void Optimizer::zero_grad(bool set_to_none) { impl_->zero_grad(set_to_none); }

size_t Optimizer::group_count() const noexcept { return impl_->group_count(); }
double Optimizer::lr(size_t group) const { return impl_->lr(group); }
void Optimizer::set_lr(double lr, size_t group) { impl_->lr(group) = lr; }
void Optimizer::set_lr(double lr) noexcept {
  for (size_t group = 0; group < group_count(); ++group) impl_->lr(group) = lr;
}

std::vector<at::Tensor> Optimizer::parameters() const {
  std::vector<at::Tensor> result;
  for (const Entry& e : impl_->entries()) result.push_back(e.handle);
  return result;
}

int64_t Optimizer::state_bytes() const noexcept { return impl_->state_bytes(); }

}  // namespace fsdpp::optim

#include "fsdpp/engine/gradient_target.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp {

std::optional<GradientTarget> gradient_target(const at::Tensor& parameter) {
  if (torch::autograd::get_current_graph_task_id() < 0 || c10::GradMode::is_enabled()) return std::nullopt;
  auto unit = engine::find_unit(parameter);
  return unit ? unit->gradient_target(parameter) : std::nullopt;
}

namespace engine {

std::optional<GradientTarget> Unit::gradient_target(const at::Tensor& handle) {
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i)
      if (b->params()[i].handle().is_same(handle)) return gradient_target(*b, i);
  return std::nullopt;
}

std::optional<GradientTarget> Unit::gradient_target(FlatBuffer& buffer, size_t param) {
  bool in_place = reduces_in_place(buffer) && requires_gradient_sync_;
  bool waits = requires_gradient_sync_ && context_->reduces_on_wire() && context_->reduce_buffers() < 2;
  if (waits || !buffer.takes_targets(in_place) || !buffer.params()[param].handle().requires_grad()) return std::nullopt;
  if (!in_backward()) begin_backward(torch::autograd::get_current_graph_task_id());
  settle_reductions();
  if (!in_place && !buffer.has_gradient_buffer()) context_->make_room_for_reduce();
  targets_given_ = true;
  return buffer.target(param, in_place, context_->gradient_pool(), context_->compute_stream());
}

}  // namespace engine
}  // namespace fsdpp

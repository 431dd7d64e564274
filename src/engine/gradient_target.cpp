#include "fsdpp/engine/gradient_target.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "engine/autograd_edges.h"
#include "engine/unit.h"

namespace fsdpp {

std::optional<GradientTarget> gradient_target(const at::Tensor& parameter) {
  if (torch::autograd::get_current_graph_task_id() < 0 || c10::GradMode::is_enabled()) return std::nullopt;
  auto place = engine::accumulated_parameter(parameter);
  return place.unit ? place.unit->gradient_target(*place.buffer, place.index) : std::nullopt;
}

namespace engine {

std::optional<GradientTarget> Unit::gradient_target(FlatBuffer& buffer, size_t param) {
  bool in_place = reduces_in_place(buffer) && requires_gradient_sync_;
  bool waits = requires_gradient_sync_ && context_->reduces_on_wire() && context_->reduce_buffers() < 2;
  auto handle = buffer.params()[param].handle();
  if (waits || !buffer.takes_targets(in_place) || !handle.defined() || !handle.requires_grad()) return std::nullopt;
  if (!in_backward()) begin_backward(torch::autograd::get_current_graph_task_id());
  settle_reductions();
  if (!in_place && !buffer.has_gradient_buffer()) context_->make_room_for_reduce();
  targets_given_ = true;
  return buffer.target(param, in_place, context_->gradient_pool(), context_->compute_stream());
}

}  // namespace engine
}  // namespace fsdpp

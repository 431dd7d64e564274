#include "fsdpp/engine/gradient_target.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "engine/autograd_edges.h"
#include "engine/unit.h"

namespace fsdpp {

std::optional<GradientTarget> gradient_target(const at::Tensor& parameter, const at::Tensor& early) {
  if (torch::autograd::get_current_graph_task_id() < 0 || c10::GradMode::is_enabled()) return std::nullopt;
  auto place = engine::accumulated_parameter(parameter);
  return place.unit ? place.unit->gradient_target(*place.buffer, place.index, early) : std::nullopt;
}

std::optional<at::Tensor> early_gradient(const at::Tensor& parameter) {
  if (torch::autograd::get_current_graph_task_id() >= 0) return std::nullopt;
  auto place = engine::accumulated_parameter(parameter);
  return place.unit ? place.unit->early_gradient(*place.buffer) : std::nullopt;
}

namespace engine {

bool Unit::offers_targets(const FlatBuffer& buffer, bool in_place) const {
  bool waits = requires_gradient_sync_ && context_->reduces_on_wire() && context_->reduce_buffers() < 2;
  return !waits && buffer.takes_targets(in_place);
}

std::optional<at::Tensor> Unit::early_gradient(FlatBuffer& buffer) {
  bool in_place = reduces_in_place(buffer) && requires_gradient_sync_;
  if (in_backward() || !offers_targets(buffer, in_place)) return std::nullopt;
  choose_gradient_dtype();
  return buffer.early_gradient(in_place, {context_, &context_->gradient_pool()}, context_->compute_stream());
}

std::optional<GradientTarget> Unit::gradient_target(FlatBuffer& buffer, size_t param, const at::Tensor& early) {
  bool in_place = reduces_in_place(buffer) && requires_gradient_sync_;
  auto handle = buffer.params()[param].handle();
  if (!offers_targets(buffer, in_place) || !handle.defined() || !handle.requires_grad()) return std::nullopt;
  if (!in_backward()) begin_backward(torch::autograd::get_current_graph_task_id());
  settle_reductions();
  if (!in_place && !buffer.has_gradient_buffer()) context_->make_room_for_reduce();
  targets_given_ = true;
  return buffer.target(param, in_place, context_->gradient_pool(), context_->compute_stream(), early);
}

}  // namespace engine
}  // namespace fsdpp

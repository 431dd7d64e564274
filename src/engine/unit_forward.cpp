#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include "base/enforce.h"
#include "engine/autograd_edges.h"
#include "engine/unit.h"
#include "fsdpp/engine/recomputation.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::engine {

// All graphs of a step share one accumulator per parameter, though changing the handle's dtype makes LibTorch forget it. One that was
// made on another stream is left to its old graph: it would order this step's gradients by that stream.
void Unit::install_accumulators() {
  auto stream = context_->compute_stream();
  bool moved = !(accumulator_stream_ == stream);
  accumulator_stream_ = stream;
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i) {
      auto& p = b->params()[i];
      auto h = p.handle();
      if (!h.defined() || !h.requires_grad()) continue;
      p.held_accumulator = hooked_accumulator(h, moved ? nullptr : p.accumulator.lock(), shared_from_this(), *b, i);
      p.accumulator = p.held_accumulator;
    }
}

// From now on they live as long as a graph that wants them.
void Unit::release_accumulators() {
  for (auto& b : buffers_)
    for (auto& p : b->params()) p.held_accumulator.reset();
}

void Unit::pre_forward() {
  trace::Scope scope(trace::Kind::PreForward, name_);
  check_hooks();
  bool recomputes = in_backward() || torch::autograd::get_current_graph_task_id() >= 0;
  gather(recomputes ? GatherReason::Backward : GatherReason::Forward);
  bool goes_on = !recomputes && !begin_group();
  if (!recomputes && !goes_on && !buffers_.empty()) context_->record_forward_use(shared_from_this());
  show();
  if (!goes_on && !Recomputation::running()) began_at_ = context_->next_tick();
  for (auto& weak : borrowed_)
    if (auto owner = weak.lock()) owner->lend();
}

// False if a module of the unit ran before in this forward, and others are still to come.
bool Unit::begin_group() {
  if (!to_run_.empty()) return false;
  if (modules_.size() == 1) return true;
  for (auto& m : modules()) to_run_.push_back(m.get());
  return true;
}

void Unit::lend() {
  ++lent_;
  pre_forward();
}

void Unit::take_back(bool will_backward) {
  --lent_;
  post_forward(nullptr, will_backward);
}

void Unit::abandon_forward() {
  lent_ = 0;
  to_run_.clear();
  group_wants_backward_ = false;
  release_accumulators();
  for (auto& weak : borrowed_)
    if (auto owner = weak.lock()) owner->abandon_forward();
  if (!in_backward()) reshard();
}

int Unit::group_after_forward() const {
  int group = options_.reshard_after_forward ? options_.reshard_after_forward->group() : root_default_ ? 1 : 0;
  return group == context_->mesh().shard_size() && group > 1 ? 0 : group;
}

void Unit::set_reshard_after_forward(ReshardAfterForward value) {
  if (value.group() > 1) (void)context_->mesh().subgroup_comm(value.group());
  if (value.group() < 0) fail<ConfigError>("reshard_after_forward of unit '{}': expected true, false or a group size, got {}", name_, value.group());
  options_.reshard_after_forward = value;
}

void Unit::post_forward(const torch::nn::Module* module, bool will_backward) {
  trace::Scope scope(trace::Kind::PostForward, name_);
  release_accumulators();
  for (auto& weak : borrowed_)
    if (auto owner = weak.lock()) owner->take_back(will_backward);
  if (in_backward() || lent_ > 0) return;  // recomputation: backward goes on with the gathered parameters; or a borrower does
  hide();
  bool recomputes = torch::autograd::get_current_graph_task_id() >= 0;  // its backward follows at once, if there is one
  if (!recomputes)
    leave_group(module, will_backward);
  else if (!will_backward)
    end_forward(false);
  if (Recomputation::running()) return;  // backward goes through what the first run did
  if (will_backward && !buffers_.empty()) post_forward_index_ = context_->record_post_forward(shared_from_this());
  ended_at_ = context_->next_tick();
}

// A unit of several modules is gathered until each of them has run; the end of the root's forward is the last moment.
void Unit::leave_group(const torch::nn::Module* module, bool will_backward) {
  group_wants_backward_ = group_wants_backward_ || will_backward;
  if (module && modules_.size() > 1) {
    std::erase(to_run_, module);
    if (!to_run_.empty()) return context_->end_group_later(shared_from_this());
  }
  end_group();
}

void Unit::end_open_group() {
  if (!to_run_.empty()) end_group();
}

void Unit::end_group() {
  to_run_.clear();
  end_forward(std::exchange(group_wants_backward_, false));
}

// The root keeps its parameters by default, but not after a forward that no backward follows.
void Unit::end_forward(bool will_backward) {
  int group = group_after_forward();
  bool keep = group == 1 && (options_.reshard_after_forward || will_backward);
  if (keep) return;
  if (group > 1 && will_backward)
    for (auto& b : buffers_) b->keep_group_piece(group, context_->gathered_pool(), context_->compute_stream());
  reshard();
}

}  // namespace fsdpp::engine

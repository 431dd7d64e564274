#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/enforce.h"
#include "engine/unit.h"
#include "engine/use_guard.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::engine {

void Unit::begin_backward(int task) {
  backward_task_ = task;
  choose_gradient_dtype();
  expected_grads_ = 0;
  seen_grads_ = 0;
  reached_last_module_ = false;
  for (auto& b : buffers_)
    for (auto& p : b->params()) expected_grads_ += p.accumulator.expired() ? 0 : 1;
  context_->touch(shared_from_this());
}

// What an optimizer takes and drops inside backward, and the user does not see, need not have the parameters' dtype.
bool Unit::keeps_reduce_dtype() const noexcept { return steps_in_backward() && !has_param_hooks_; }

void Unit::choose_gradient_dtype() {
  for (auto& b : buffers_) b->keep_reduce_dtype(keeps_reduce_dtype());
}

void Unit::forget_backward() noexcept {
  if (--awaited_outputs_ > 0 || in_backward() || kept_after_backward_ || state_ != UnitState::Cached) return;
  try {
    reshard();
  } catch (...) {  // a lost device: the memory goes with the pool
  }
}

void Unit::pre_backward(bool last_module) {
  trace::Scope scope(trace::Kind::PreBackward, name_);
  context_->reshard_finished(*this);
  if (!in_backward()) begin_backward(torch::autograd::get_current_graph_task_id());
  reached_last_module_ = reached_last_module_ || last_module;
  if (unshards_in_backward_ || state_ != UnitState::Sharded) gather_in_backward();
}

void Unit::gather_on_demand() {
  pre_backward();
  if (state_ == UnitState::Sharded) gather_in_backward();
}

void Unit::gather_in_backward() {
  gather(GatherReason::Backward);
  if (expected_grads_ == 0 && reshard_after_backward_)
    context_->reshard_later(shared_from_this());  // no gradient of its own will say that it is done
  context_->prefetch_backward(*this);
  show();
  for (auto& weak : borrowed_)
    if (auto owner = weak.lock()) owner->pre_backward();
}

// The sharded .grad must not meet the gathered parameter's gradient: it is put aside and handed back when backward ends.
void Unit::before_accumulate(FlatBuffer& buffer, size_t param) {
  if (!in_backward()) begin_backward(torch::autograd::get_current_graph_task_id());
  auto& p = buffer.params()[param];
  auto handle = p.handle();
  if (state_ != UnitState::Shown) point_handle(handle, p.gathered_view);  // accumulation reads its shape only
  p.put_grad_aside(handle);
}

void Unit::after_accumulate(FlatBuffer& buffer, size_t param) {
  auto& p = buffer.params()[param];
  auto handle = p.handle();
  if (state_ != UnitState::Shown) point_handle(handle, p.shard_view);
  auto grad = std::exchange(handle.mutable_grad(), at::Tensor());  // undefined if it was written to its target, or there is none
  if (grad.defined()) p.unsharded_grad = p.unsharded_grad.defined() ? p.unsharded_grad.add(grad) : grad;
  if (++seen_grads_ == expected_grads_) post_backward();
}

bool Unit::has_frozen_params() const {
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined() && !h.requires_grad()) return true;
  return false;
}

// All its gradients are there, but the inputs' may still want frozen parameters, or a module's whose backward is to come.
bool Unit::may_be_read_on() const { return has_frozen_params() || (modules_.size() > 1 && !reached_last_module_); }

void Unit::post_backward() {
  trace::Scope scope(trace::Kind::PostBackward, name_);
  targets_given_ = false;
  if (!reshard_after_backward_)
    hide();
  else if (may_be_read_on())
    context_->reshard_later(shared_from_this());
  else
    reshard();
  // Ranks may differ in which units a backward reaches, and when: those that allow it reduce at its end, in one order.
  if (requires_gradient_sync_ && !reduces_unused_)
    reduce();
  else
    accumulate();
}

// A second reduction in one backward (a module used again after its gradients were reduced) waits for the first.
void Unit::settle_reductions() {
  for (auto& b : buffers_)
    if (b->is_reducing()) return context_->drain_reduces(0);
}

void Unit::accumulate() {
  settle_reductions();
  for (auto& b : buffers_) {
    if (!b->needs_packing()) continue;
    if (b->plan().slice_numel == 0)
      b->reduce_locally(context_->compute_stream());  // gradients without elements: nothing to add up
    else
      b->accumulate(context_->gradient_pool(), context_->compute_stream());
  }
  context_->note_late_reducer(shared_from_this());
}

bool Unit::owes_reduction() const {
  if (!requires_gradient_sync_) return false;
  if (reduces_unused_) return true;
  return std::any_of(buffers_.begin(), buffers_.end(), [](auto& b) { return b->has_accumulated() && !b->is_reducing(); });
}

// A buffer is reduced along when another one of the unit is, with zeros: on another rank its gradients may be there.
bool Unit::wants_reduction(const FlatBuffer& buffer, bool others_reduce) const {
  if (buffer.needs_packing() || buffer.has_accumulated()) return true;
  return buffer.trains() && (reduces_unused_ || (others_reduce && context_->reduces_on_wire()));
}

// One rank, nothing to do on the way: gradients go straight into the sharded ones.
bool Unit::reduces_in_place(const FlatBuffer& buffer) const {
  return !context_->reduces_on_wire() && !buffer.has_accumulated() && !reduced_hook_ && !writes_host_memory();
}

void Unit::reduce() {
  trace::Scope scope(trace::Kind::Reduce, name_);
  settle_reductions();
  auto compute = context_->compute_stream();
  std::vector<FlatBuffer*> reducing;
  bool any = std::any_of(buffers_.begin(), buffers_.end(), [&](auto& b) { return wants_reduction(*b, false); });
  for (auto& b : buffers_) {
    if (!wants_reduction(*b, any)) continue;
    if (reduces_unused_) b->use_zeros_for_missing();
    if (reduces_in_place(*b) || b->plan().slice_numel == 0) {
      b->reduce_locally(compute);
      continue;
    }
    if (reducing.empty()) context_->make_room_for_reduce();
    if (b->needs_packing() || !b->has_gradient_buffer()) b->accumulate(context_->gradient_pool(), compute);
    reducing.push_back(b.get());
  }
  if (any) ++stats_.reduces;
  if (reducing.empty()) return run_param_hooks(compute);
  for (auto* b : reducing) context_->step_check().note(StepCheck::Kind::Reduce, name_, b->gradient_bytes());
  auto stream = context_->reduce_stream();
  stream.wait(compute);
  auto& comm = context_->mesh().reduce_comm();
  auto info = wire_info("root unit, reduce");
  comm::Ticket ticket;
  if (reducing.size() == 1) {
    ticket = reducing[0]->reduce_scatter(comm, stream, info);
  } else {
    comm::Group group(comm);
    for (auto* b : reducing) (void)b->reduce_scatter(comm, stream, info);
    ticket = group.finish();
  }
  context_->push_reduce(std::move(ticket), [self = shared_from_this(), reducing] { self->finish_reduce(reducing); });
}

// After the reduce-scatter: the replicas' all-reduce, if there are any and it is not put off, then the sharded gradients.
void Unit::finish_reduce(const std::vector<FlatBuffer*>& reducing) {
  auto& pool = context_->gradient_pool();
  auto reduce_stream = context_->reduce_stream(), stream = context_->all_reduce_stream();
  bool replicates = context_->mesh().replicate_size() > 1;
  if (replicates && !requires_all_reduce_) {
    for (auto* b : reducing) b->keep_partial(pool, reduce_stream);
    return;
  }
  if (replicates) {
    stream.wait(reduce_stream);
    auto info = wire_info("root unit, all-reduce");
    for (auto* b : reducing) b->all_reduce(context_->mesh().replicate_comm(), stream, info).wait(stream);
    ++stats_.all_reduces;
    context_->step_check().note(StepCheck::Kind::AllReduce, name_, 0);
  }
  for (auto* b : reducing) b->finish_reduce(pool, context_->staging_pool(), stream, reduced_hook_);
  if (writes_host_memory()) context_->note_host_access(stream);
  run_param_hooks(stream);
}

// Gradients that wait here, and zeros for what a backward did not reach where the unit allows that.
void Unit::reduce_late() {
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined() && h.requires_grad()) p.put_grad_aside(h);
  reduce();
}

// Each with .grad final for this reduction and the handle showing the local shard; the current stream is the reduction's.
void Unit::run_param_hooks(cuda::StreamView stream) {
  if (!runs_hooks()) return;
  if (writes_host_memory()) context_->settle_host_access();
  cuda::StreamGuard stream_guard(stream);
  at::NoGradGuard no_grad;
  ShardAccess access;
  const auto stepping = stepper();
  std::vector<ParamState*> ready;
  std::vector<at::Tensor> handles;
  for (auto& b : buffers_)
    for (auto& p : b->params()) {
      auto h = p.handle();
      if ((p.hooks.empty() && !stepping) || !h.defined() || !p.reduced || !p.sharded_grad.defined()) continue;
      h.mutable_grad() = std::exchange(p.sharded_grad, at::Tensor());
      p.grad_put_aside = false;
      if (state_ == UnitState::Shown) point_handle(h, p.shard_view);
      for (auto& hook : p.hooks) hook(h);
      ready.push_back(&p);
      handles.push_back(std::move(h));
    }
  if (ready.empty()) return;
  hooks_run_ = true;
  if (stepping) stepping->step_some(handles);
  for (auto& h : handles)  // of no optimizer
    if (auto& grad = h.mutable_grad(); grad.defined() && grad.scalar_type() != h.scalar_type())
      grad = grad.to(h.scalar_type());
  if (state_ != UnitState::Shown) return;
  for (size_t i = 0; i < ready.size(); ++i) point_handle(handles[i], ready[i]->gathered_view);
}

void Unit::check_hooks() const {
  FSDPP_ENFORCE(lost_hook_.empty(), UsageError,
                "parameter '{}': its post-accumulate-grad hook was replaced after fully_shard, so its gradient can't be reduced. Try: "
                "register_post_accumulate_grad_hook, which runs after the reduction.", lost_hook_);
}

void Unit::note_lost_hook(const std::string& param) noexcept {
  lost_hook_ = param;
  kept_alive_.push_back(shared_from_this());  // by itself, to say so: the parameter no longer owns it
}

void Unit::finish_backward() {
  bool pending = owes_reduction() && !reduces_unused_ && seen_grads_ == 0;
  for (auto& b : buffers_) pending = pending || b->has_unsharded_grads();
  pending = pending || targets_given_;
  if (pending) post_backward();
  end_backward();
}

void Unit::end_backward() {
  if (reshard_after_backward_)
    reshard();
  else
    hide();
  kept_after_backward_ = state_ == UnitState::Cached;
  backward_task_ = -1;
}

bool Unit::append_gradient_flags(std::vector<char>& flags) const {
  size_t begin = flags.size();
  bool lacks = false;
  for (auto& b : buffers_)
    for (auto& p : b->params()) {
      flags.push_back(p.reduced ? 1 : 0);
      if (p.reduced) continue;
      auto h = p.handle();
      lacks = lacks || (h.defined() && h.requires_grad());
    }
  bool reduced = std::find(flags.begin() + static_cast<std::ptrdiff_t>(begin), flags.end(), 1) != flags.end();
  return lacks && reduced;
}

bool Unit::adopt_gradient_flags(const char* flags) {
  bool any = false;
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i, ++flags)
      if (*flags && !b->params()[i].reduced) b->adopt_gradient(i), any = true;
  run_param_hooks(context_->all_reduce_stream());
  return any;
}

void Unit::restore_grads() {
  for (auto& b : buffers_)
    for (auto& p : b->params()) {
      if (!p.grad_put_aside && !p.sharded_grad.defined()) continue;
      if (auto h = p.handle(); h.defined()) h.mutable_grad() = std::exchange(p.sharded_grad, at::Tensor());
      p.grad_put_aside = false;
    }
  for (auto& b : buffers_) b->end_backward();
}

void Unit::abandon_backward() {
  targets_given_ = false;
  for (auto& b : buffers_) b->drop_gradients(context_->gradient_pool(), context_->compute_stream());
  reshard();
  restore_grads();
  backward_task_ = -1;
}

}  // namespace fsdpp::engine

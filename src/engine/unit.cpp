#include "engine/unit.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "base/enforce.h"
#include "engine/autograd_edges.h"
#include "engine/registry.h"
#include "engine/use_guard.h"
#include "fsdpp/engine/recomputation.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::engine {
namespace {

using BufferKey = std::tuple<c10::ScalarType, bool, bool>;  // dtype, requires_grad, keeps_dtype

FlatBuffer::Config buffer_config(const comm::Mesh& mesh, const FullyShardOptions& options, c10::ScalarType dtype, bool keeps_dtype) {
  auto& policy = options.mp_policy;
  FlatBuffer::Config config;
  config.device = mesh.device();
  config.world_size = mesh.shard_size();
  config.rank = mesh.shard_rank();
  config.replicate_size = mesh.replicate_size();
  config.dtype = dtype;
  if (auto& offload = options.offload_policy) {
    config.offload_params = offload->params;
    config.offload_gradients = offload->gradients;
    config.pin_memory = offload->pin_memory;
  }
  config.keep_cast = options.keep_cast_shard;
  bool floating = c10::isFloatingType(dtype);
  if (floating && !keeps_dtype) config.param_dtype = policy.param_dtype;
  if (floating) config.policy_reduce_dtype = policy.reduce_dtype;
  config.set_dtype(dtype);
  return config;
}

}  // namespace

Unit::Unit(std::vector<std::weak_ptr<torch::nn::Module>> modules, const std::vector<Param>& params,
           std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options)
    : modules_(std::move(modules)), context_(CommContext::of(mesh)), options_(options) {
  std::map<BufferKey, std::pair<std::vector<at::Tensor>, std::vector<std::string>>> groups;
  for (auto& p : params) {
    auto& group = groups[{p.handle.scalar_type(), p.handle.requires_grad(), p.keeps_dtype && options.mp_policy.param_dtype}];
    group.first.push_back(p.handle);
    group.second.push_back(p.name);
  }
  if (options.reshard_after_forward) set_reshard_after_forward(*options.reshard_after_forward);
  std::vector<FlatBuffer::Config> configs;  // all of them first: nothing is changed if one is refused
  for (auto& [key, group] : groups) configs.push_back(buffer_config(*mesh, options, std::get<0>(key), std::get<2>(key)));
  size_t i = 0;
  for (auto& [key, group] : groups)
    buffers_.push_back(std::make_unique<FlatBuffer>(configs[i++], std::move(group.first), std::move(group.second)));
  if (options.offload_policy) context_->copies_to_host();
}

Unit::~Unit() { release_memory(); }

void Unit::release_memory() {
  try {
    if (state_ == UnitState::Gathering) gather_ticket_.wait_host();
    context_->settle_host_access();
    for (auto& b : buffers_) {
      b->free_gathered(context_->gathered_pool(), context_->compute_stream());
      b->drop_group_piece(context_->gathered_pool(), context_->compute_stream());
      b->drop_gradients(context_->gradient_pool(), context_->compute_stream());
    }
  } catch (...) {  // a failed communicator or device: the pools go with the context
  }
}

void Unit::attach() {
  auto self = shared_from_this();
  note_buffers();
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i) hook_parameter(b->params()[i].handle(), self, *b, i);
}

// Their storages are new.
void Unit::note_buffers() {
  gathered_bytes_ = 0;
  for (auto& b : buffers_) {
    guard_storage(b->shard_storage(), weak_from_this());
    guard_storage(b->gathered_storage(), weak_from_this());
    gathered_bytes_ += b->gathered_bytes();
  }
}

void Unit::add_param_hook(const at::Tensor& handle, std::function<void(const at::Tensor&)> hook) {
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (p.handle().is_same(handle)) p.hooks.push_back(hook);
  has_param_hooks_ = true;
  for (auto& b : buffers_) b->expect_early_free();
}

void Unit::step_by(std::weak_ptr<BackwardStepper> stepper) {
  stepper_ = std::move(stepper);
  for (auto& b : buffers_) b->expect_early_free();
}

void Unit::refresh_casts(cuda::StreamView stream) {
  for (auto& b : buffers_) {
    if (shard_written_) b->note_written();
    b->refresh_cast(stream);
  }
}

at::Tensor Unit::cast_view(const at::Tensor& parameter) const {
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i)
      if (b->params()[i].handle().is_same(parameter)) return b->cast_view(i);
  return {};
}

void Unit::note_cast_written(const at::Tensor& parameter) noexcept {
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i)
      if (b->params()[i].handle().is_same(parameter)) b->note_cast_written(i);
}

bool Unit::manages(const torch::nn::Module* module) const {
  return std::any_of(modules_.begin(), modules_.end(), [&](auto& weak) { return weak.lock().get() == module; });
}

std::vector<std::shared_ptr<torch::nn::Module>> Unit::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (auto& weak : modules_)
    if (auto m = weak.lock()) alive.push_back(std::move(m));
  return alive;
}

void Unit::initialise_root() {
  auto root = module();
  if (root_initialised_ || under_root_ || !root) return;
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (auto& p : root->named_parameters(true)) names.emplace(p.value().unsafeGetTensorImpl(), p.key());
  std::string description;
  std::vector<Unit*> seen;
  for (auto& m : root->named_modules("", true)) {
    auto unit = find_unit(m.value().get());
    if (!unit || std::find(seen.begin(), seen.end(), unit.get()) != seen.end()) continue;
    seen.push_back(unit.get());
    unit->set_name(m.key());
    unit->context().check_each_step(unit);
    unit->set_root_default(unit.get() == this);
    for (auto& b : unit->buffers())
      for (auto& p : b->params())
        if (auto it = names.find(p.handle().unsafeGetTensorImpl()); it != names.end()) p.name = it->second;
    description += unit->describe();
  }
  check_same_model(*context_, description);
  root_initialised_ = true;
}

void Unit::set_reduce_unused_params(bool value) {
  reduces_unused_ = value;
  context_->note_late_reducer(shared_from_this());
}

void Unit::set_gradient_divide_factor(double factor) {
  FSDPP_ENFORCE(factor > 0, ConfigError, "gradient divide factor of unit '{}': expected a positive number, got {}", name_, factor);
  for (auto& b : buffers_)
    if (c10::isFloatingType(b->config().dtype)) b->set_divide_factor(factor);
}

void Unit::set_root_default(bool is_root) {
  root_default_ = is_root;
  under_root_ = !is_root;
}

// -- memory and handles --------------------------------------------------------------------------------------------------

bool Unit::cache_is_current() const {
  if (shard_written_) return false;
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined() && (h._version() != p.version || b->is_replaced(h))) return false;
  return true;
}

bool Unit::has_group_pieces() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](auto& b) { return b->has_group_piece(); });
}

void Unit::gather_buffers(cuda::StreamView stream, bool from_group) {
  auto& pool = context_->gathered_pool();
  auto& comm = from_group ? context_->mesh().subgroup_comm(group_after_forward()) : context_->mesh().gather_comm();
  auto info = wire_info("root unit, gather");
  auto one = [&](FlatBuffer& b) { return b.has_group_piece() ? b.gather_from_group(pool, comm, stream, info) : b.gather(pool, context_->staging_pool(), comm, stream, info); };
  if (buffers_.size() == 1) {
    gather_ticket_ = one(*buffers_[0]);
    return;
  }
  comm::Group group(comm);
  for (auto& b : buffers_) (void)one(*b);
  gather_ticket_ = group.finish();
}

void Unit::gather(GatherReason reason) {
  if (state_ == UnitState::Cached && !cache_is_current()) reshard();
  if (state_ != UnitState::Sharded || buffers_.empty()) return;
  check_materialized();
  trace::Scope scope(trace::Kind::Unshard, name_, gathered_bytes_);
  auto stream = context_->gather_stream();
  bool from_group = has_group_pieces();
  if (from_group && !cache_is_current()) drop_group_pieces(), from_group = false;
  if (reason == GatherReason::Explicit || from_group) stream.wait(context_->compute_stream());
  bool adopted = false;
  for (auto& b : buffers_) adopted = b->adopt_replaced_handles() || adopted;
  if (adopted) note_buffers();
  if (adopted) stream.wait(context_->compute_stream());
  if (context_->on_wire()) context_->step_check().note(StepCheck::Kind::Gather, name_, gathered_bytes_);
  if (hooks_run_) stream.wait(context_->all_reduce_stream());  // they may have changed the shards
  if (shard_written_)
    for (auto& b : buffers_) b->note_written();
  gather_buffers(stream, from_group);
  if (reads_host_memory()) context_->note_host_access(stream);
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined()) p.version = h._version();
  shard_written_ = false;
  state_ = UnitState::Gathering;
  ++stats_.gathers;
  if (reason == GatherReason::Forward) ++stats_.forward_gathers;
  if (reason == GatherReason::Backward) ++stats_.backward_gathers;
}

bool Unit::reads_host_memory() const { return options_.offload_policy && options_.offload_policy->params; }
bool Unit::writes_host_memory() const { return options_.offload_policy && options_.offload_policy->gradients; }

void Unit::drop_group_pieces() {
  for (auto& b : buffers_) b->drop_group_piece(context_->gathered_pool(), context_->gather_stream());
}

void Unit::show() {
  if (state_ != UnitState::Shown) show_gathered();
  if (state_ == UnitState::Shown && c10::GradMode::is_enabled()) install_accumulators();
}

void Unit::show_gathered() {
  if (state_ == UnitState::Sharded) return;
  std::exchange(gather_ticket_, comm::Ticket()).wait(context_->compute_stream());
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined()) point_handle(h, p.gathered_view);
  drop_group_pieces();
  state_ = UnitState::Shown;
}

void Unit::hide() {
  if (state_ != UnitState::Shown) return;
  for (auto& b : buffers_)
    for (auto& p : b->params())
      if (auto h = p.handle(); h.defined()) point_handle(h, p.shard_view);
  release_accumulators();
  state_ = UnitState::Cached;
}

void Unit::reshard() {
  if (state_ == UnitState::Sharded) return;
  trace::Scope scope(trace::Kind::Reshard, name_);
  hide();
  auto last_user = context_->compute_stream();
  if (state_ == UnitState::Gathering) {
    last_user = context_->gather_stream();
    std::exchange(gather_ticket_, comm::Ticket()).wait(last_user);
  }
  for (auto& b : buffers_) b->free_gathered(context_->gathered_pool(), last_user);
  state_ = UnitState::Sharded;
  kept_after_backward_ = false;
  ++stats_.reshards;
}

// -- forward -------------------------------------------------------------------------------------------------------------

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
  if (!recomputes && !buffers_.empty()) context_->record_forward_use(shared_from_this());
  show();
  if (!Recomputation::running()) began_at_ = context_->next_tick();
  for (auto& weak : borrowed_)
    if (auto owner = weak.lock()) owner->lend();
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
    if (to_run_.empty())
      for (auto& m : modules()) to_run_.push_back(m.get());
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

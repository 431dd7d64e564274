#include "engine/unit.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "base/enforce.h"
#include "engine/autograd_edges.h"
#include "engine/registry.h"
#include "engine/use_guard.h"
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

Unit::Place Unit::find(const at::Tensor& handle) const noexcept {
  for (auto& b : buffers_)
    for (size_t i = 0; i < b->params().size(); ++i)
      if (b->params()[i].handle().is_same(handle)) return {b.get(), i};
  return {};
}

void Unit::add_param_hook(const at::Tensor& handle, std::function<void(const at::Tensor&)> hook) {
  if (auto [buffer, i] = find(handle); buffer) buffer->params()[i].hooks.push_back(std::move(hook));
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
  auto [buffer, i] = find(parameter);
  return buffer ? buffer->cast_view(i) : at::Tensor();
}

void Unit::note_cast_written(const at::Tensor& parameter) noexcept {
  if (auto [buffer, i] = find(parameter); buffer) buffer->note_cast_written(i);
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
  for (auto& context : contexts_of(find_units(*root))) context->reserve_slots(seen);
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
  for (auto& b : buffers_) b->take_gathered(pool, stream);  // not in the group: it may have to allocate
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

}  // namespace fsdpp::engine

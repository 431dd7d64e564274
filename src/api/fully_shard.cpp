#include "fsdpp/api/fully_shard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "engine/use_guard.h"
#include "fsdpp/api/deferred_init.h"

namespace fsdpp {
namespace {

using engine::Unit;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

void check_modules(const std::vector<ModulePtr>& modules) {
  FSDPP_ENFORCE(!modules.empty(), UsageError, "fully_shard needs at least one module, got an empty list");
  for (auto& m : modules) {
    FSDPP_ENFORCE(m != nullptr, UsageError, "fully_shard got an empty module pointer");
    FSDPP_ENFORCE(!engine::find_unit(m.get()), UsageError,
                  "fully_shard was called twice on one module ({}). Expected a module that no unit manages. Try: call it once for each "
                  "module, inner modules first.", m->name());
  }
}

void check_param(const std::string& name, const at::Tensor& p, c10::Device device, bool offloaded) {
  FSDPP_ENFORCE(p.device() == device || p.is_meta() || (offloaded && p.device().is_cpu()), UsageError,
                "parameter '{}' is on {}, expected {}, the device of the mesh. Try: module->to({}) before fully_shard.", name,
                p.device().str(), device.str(), device.str());
  FSDPP_ENFORCE(p.layout() == c10::kStrided, ConfigError, "parameter '{}' has layout {}, expected a dense tensor", name, c10::str(p.layout()));
}

// The modules that belong to no unit inside: their forward runs as part of the new unit's.
std::vector<ModulePtr> own_modules(const std::vector<ModulePtr>& roots) {
  std::unordered_set<const torch::nn::Module*> nested;
  for (auto& root : roots)
    for (auto& m : root->modules(/*include_self=*/false))
      if (engine::find_unit(m.get()))
        for (auto& below : m->modules(true)) nested.insert(below.get());
  std::vector<ModulePtr> result;
  for (auto& root : roots)
    for (auto& m : root->modules(true))
      if (!nested.contains(m.get())) result.push_back(m);
  return result;
}

// Units elsewhere that manage parameters of these modules (tied ones).
std::vector<std::shared_ptr<Unit>> owners_of_tied_params(const std::vector<ModulePtr>& modules) {
  std::vector<std::shared_ptr<Unit>> owners;
  for (auto& m : modules)
    for (auto& p : m->parameters(/*recurse=*/false)) {
      auto owner = p.defined() ? engine::find_unit(p) : nullptr;
      if (owner && std::find(owners.begin(), owners.end(), owner) == owners.end()) owners.push_back(std::move(owner));
    }
  return owners;
}

// Normalisation with running statistics: they keep their dtype, and LibTorch wants the weights in the same one.
bool has_running_statistics(const torch::nn::Module& module) {
  auto buffers = module.named_buffers(/*recurse=*/false);
  auto* mean = buffers.find("running_mean");
  return mean && mean->defined();
}

std::unordered_set<const c10::TensorImpl*> params_that_keep_dtype(const std::vector<ModulePtr>& modules) {
  std::unordered_set<const c10::TensorImpl*> result;
  for (auto& root : modules)
    for (auto& m : root->modules(true))
      if (has_running_statistics(*m))
        for (auto& p : m->parameters(false)) result.insert(p.unsafeGetTensorImpl());
  return result;
}

// All of a unit's parameters have memory, or none has.
void check_not_mixed(const std::vector<Unit::Param>& params) {
  auto is_meta = [](auto& p) { return p.handle.is_meta(); };
  auto with = std::find_if_not(params.begin(), params.end(), is_meta), without = std::find_if(params.begin(), params.end(), is_meta);
  FSDPP_ENFORCE(with == params.end() || without == params.end(), UsageError,
                "parameter '{}' is on the meta device, '{}' of the same unit on {}. Expected all of a unit's parameters on meta, or none. Try: "
                "materialize the module before fully_shard, or build all of it while a DeferredInit is alive.", without->name, with->name,
                with->handle.device().str());
}

struct Collected {
  std::vector<Unit::Param> own;
  std::vector<std::shared_ptr<Unit>> borrowed;  ///< units elsewhere that manage a tied parameter
};

Collected collect(const std::vector<ModulePtr>& modules, c10::Device device, const FullyShardOptions& options) {
  bool offloaded = options.offload_policy && options.offload_policy->params;
  Collected result;
  std::unordered_set<const c10::TensorImpl*> seen;
  auto keep_dtype = params_that_keep_dtype(modules);
  for (auto& p : options.ignored_params) seen.insert(p.unsafeGetTensorImpl());
  for (auto& m : modules)
    for (auto& p : m->named_parameters(true)) {
      if (!p.value().defined() || !seen.insert(p.value().unsafeGetTensorImpl()).second) continue;
      if (engine::find_unit(p.value())) continue;
      check_param(p.key(), p.value(), device, offloaded);
      result.own.push_back({p.value(), p.key(), keep_dtype.contains(p.value().unsafeGetTensorImpl())});
    }
  result.borrowed = owners_of_tied_params(own_modules(modules));
  return result;
}

struct Named {
  std::string name;
  at::Tensor tensor;
};

// Parameters, and buffers of the modules that no nested unit has already made equal.
std::vector<Named> own_tensors(const std::vector<ModulePtr>& modules, const Collected& collected) {
  std::vector<Named> result;
  for (auto& p : collected.own) result.push_back({p.name, p.handle});
  for (auto& m : own_modules(modules))
    for (auto& b : m->named_buffers(/*recurse=*/false))
      if (b.value().defined()) result.push_back({b.key(), b.value()});
  return result;
}

void cast_buffers(const std::vector<ModulePtr>& modules, c10::ScalarType dtype) {
  for (auto& m : own_modules(modules)) {
    if (has_running_statistics(*m)) continue;
    for (auto& b : m->buffers(/*recurse=*/false))
      if (b.defined() && b.is_floating_point()) b.set_data(b.to(dtype));
  }
}

// Where rank 0 has a value and this rank has none, gives the tensor memory to receive it. Every rank throws where any has a value
// that rank 0 lacks.
void make_room(const std::vector<Named>& tensors, comm::Mesh& mesh) {
  auto mine = at::empty({static_cast<int64_t>(tensors.size())}, at::kLong);
  for (size_t i = 0; i < tensors.size(); ++i) mine.data_ptr<int64_t>()[i] = tensors[i].tensor.is_meta() ? 0 : 1;
  auto at_rank0 = mine.to(mesh.device(), /*non_blocking=*/false, /*copy=*/true), anywhere = at_rank0.clone();
  engine::broadcast_from_rank0(mesh, {at_rank0});
  engine::keep_largest(mesh, anywhere);
  at_rank0 = at_rank0.cpu(), anywhere = anywhere.cpu();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i].tensor;
    bool rank0_has = at_rank0.data_ptr<int64_t>()[i] != 0;
    FSDPP_ENFORCE(rank0_has || anywhere.data_ptr<int64_t>()[i] == 0, UsageError,
                  "sync_from_rank0: '{}' of shape [{}] is on the meta device on rank 0, but not on every rank. Expected rank 0 "
                  "to have what any rank has. Try: build the module on rank 0 without a DeferredInit, or under one on every rank.",
                  tensors[i].name, fmt::join(t.sizes(), ", "));
    if (!rank0_has || !t.is_meta()) continue;
    engine::point_handle(t, at::empty(t.sizes(), at::TensorOptions(mesh.device()).dtype(t.scalar_type())));
    torch::autograd::impl::set_grad_accumulator(t, {});
  }
}

void sync_from_rank0(const std::vector<ModulePtr>& modules, const Collected& collected, comm::Mesh& mesh) {
  at::NoGradGuard no_grad;
  const auto named = own_tensors(modules, collected);
  make_room(named, mesh);
  std::vector<at::Tensor> tensors;
  for (auto& t : named)
    if (!t.tensor.is_meta()) tensors.push_back(t.tensor.detach());  // of the others materialize() makes equal values
  engine::broadcast_from_rank0(mesh, tensors);
}

}  // namespace

UnitHandle fully_shard(const std::vector<ModulePtr>& modules, std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options) {
  FSDPP_ENFORCE(mesh != nullptr, UsageError, "fully_shard got no mesh. Try: Mesh::shard(World::init()).");
  check_modules(modules);
  auto buffer_dtype = options.mp_policy.buffer_dtype;
  FSDPP_ENFORCE(!buffer_dtype || c10::isFloatingType(*buffer_dtype), ConfigError, "buffer_dtype: expected a floating-point dtype, got {}",
                c10::toString(*buffer_dtype));
  const DeferredInit::Pause pause;
  auto collected = collect(modules, mesh->device(), options);
  if (options.sync_from_rank0.value_or(mesh->replicate_size() > 1)) sync_from_rank0(modules, collected, *mesh);
  check_not_mixed(collected.own);
  auto unit = std::make_shared<Unit>(std::vector<std::weak_ptr<torch::nn::Module>>(modules.begin(), modules.end()), collected.own,
                                     std::move(mesh), options);
  for (auto& owner : collected.borrowed) unit->borrow(owner);
  if (buffer_dtype) cast_buffers(modules, *buffer_dtype);
  unit->attach();
  engine::register_unit(unit, modules);
  return UnitHandle(unit);
}

UnitHandle fully_shard(const ModulePtr& module, std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options) {
  return fully_shard(std::vector<ModulePtr>{module}, std::move(mesh), options);
}

shard::ShardedParam sharding_of(const at::Tensor& parameter) {
  auto unit = engine::find_unit(parameter);
  FSDPP_ENFORCE(unit != nullptr, UsageError, "no unit manages this tensor of shape {}. Expected a parameter of a module given to fully_shard.",
                fmt::join(parameter.sizes(), "x"));
  for (auto& p : unit->sharded_params())
    if (p.handle.unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl()) return p;
  fail<UsageError>("this tensor is no longer a parameter of unit '{}'", unit->name());
}

void register_post_accumulate_grad_hook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> hook) {
  auto unit = engine::find_unit(parameter);
  FSDPP_ENFORCE(unit != nullptr, UsageError, "register_post_accumulate_grad_hook: no unit manages this tensor of shape {}. Expected a parameter of a module "
                "given to fully_shard.", fmt::join(parameter.sizes(), "x"));
  unit->add_param_hook(parameter, std::move(hook));
}

at::Tensor full_tensor(const at::Tensor& parameter) {
  auto info = sharding_of(parameter);
  auto unit = engine::find_unit(parameter);
  unit->check_materialized();
  engine::ShardAccess access;
  return shard::full_tensor(info, unit->local_shard(parameter).detach());
}

}  // namespace fsdpp

#include "fsdpp/api/fully_shard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_set>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "engine/use_guard.h"

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
  FSDPP_ENFORCE(p.device() == device || (offloaded && p.device().is_cpu()), UsageError,
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

// Parameters, and buffers of the modules that no nested unit has already made equal.
void sync_from_rank0(const std::vector<ModulePtr>& modules, const Collected& collected, comm::Mesh& mesh) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (auto& p : collected.own) tensors.push_back(p.handle.detach());
  for (auto& m : modules)
    for (auto& inner : m->modules(true))
      if (inner == m || !engine::find_unit(inner.get()))
        for (auto& b : inner->buffers(false)) tensors.push_back(b);
  engine::broadcast_from_rank0(mesh, tensors);
}

}  // namespace

UnitHandle fully_shard(const std::vector<ModulePtr>& modules, std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options) {
  FSDPP_ENFORCE(mesh != nullptr, UsageError, "fully_shard got no mesh. Try: Mesh::shard(World::init()).");
  check_modules(modules);
  auto collected = collect(modules, mesh->device(), options);
  if (options.sync_from_rank0.value_or(mesh->replicate_size() > 1)) sync_from_rank0(modules, collected, *mesh);
  auto unit = std::make_shared<Unit>(std::vector<std::weak_ptr<torch::nn::Module>>(modules.begin(), modules.end()), collected.own,
                                     std::move(mesh), options);
  for (auto& owner : collected.borrowed) unit->borrow(owner);
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
  engine::ShardAccess access;
  return shard::full_tensor(info, unit->local_shard(parameter).detach());
}

}  // namespace fsdpp

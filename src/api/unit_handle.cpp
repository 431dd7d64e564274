#include "fsdpp/api/unit_handle.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp {
namespace {

using engine::Unit;

std::shared_ptr<Unit> lock(const std::weak_ptr<Unit>& weak) {
  auto unit = weak.lock();
  FSDPP_ENFORCE(unit != nullptr, UsageError, "this UnitHandle's module no longer exists");
  return unit;
}

// Applies f to the unit, and with `recurse` to the units below all of its modules.
template <class F>
void for_each_unit(const std::weak_ptr<Unit>& weak, bool recurse, F f) {
  auto unit = lock(weak);
  if (!recurse) return f(*unit);
  std::vector<std::shared_ptr<Unit>> reached;
  for (auto& module : unit->modules())
    for (auto& u : engine::find_units(*module))
      if (std::find(reached.begin(), reached.end(), u) == reached.end()) reached.push_back(u);
  for (auto& u : reached) f(*u);
}

}  // namespace

std::string UnitHandle::name() const { return lock(unit_)->name(); }

void UnitHandle::unshard(bool async) const {
  auto unit = lock(unit_);
  unit->gather(engine::GatherReason::Explicit);
  if (!async) unit->show();
}

void UnitHandle::wait_unshard() const {
  auto unit = lock(unit_);
  FSDPP_ENFORCE(unit->buffers().empty() || unit->state() != engine::UnitState::Sharded, UsageError,
                "wait_unshard on unit '{}', which is sharded. Try: unshard(true) first.", unit->name());
  unit->show();
}

void UnitHandle::reshard() const { lock(unit_)->reshard(); }

bool UnitHandle::is_sharded() const {
  auto state = lock(unit_)->state();
  return state == engine::UnitState::Sharded;
}

void UnitHandle::set_requires_gradient_sync(bool value, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_requires_gradient_sync(value); });
}
void UnitHandle::set_requires_all_reduce(bool value, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_requires_all_reduce(value); });
}
void UnitHandle::set_reshard_after_forward(ReshardAfterForward value, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_reshard_after_forward(value); });
}
void UnitHandle::set_unshard_in_backward(bool value) const { lock(unit_)->set_unshard_in_backward(value); }
void UnitHandle::set_reduce_scatter_unused_params(bool value, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_reduce_unused_params(value); });
}
void UnitHandle::set_reduce_scatter_max_input_buffers(int count) const {
  auto unit = lock(unit_);
  FSDPP_ENFORCE(count >= 1, ConfigError, "set_reduce_scatter_max_input_buffers of unit '{}': expected at least 1, got {}", unit->name(), count);
  auto& context = unit->context();
  context.set_reduce_buffers(std::max(context.reduce_buffers(), count));
}
void UnitHandle::set_gradient_divide_factor(double factor, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_gradient_divide_factor(factor); });
}
void UnitHandle::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook) const { lock(unit_)->set_reduced_hook(std::move(hook)); }
void UnitHandle::set_modules_to_forward_prefetch(const std::vector<UnitHandle>& units) const {
  lock(unit_)->set_forward_prefetch(references(units));
}
void UnitHandle::set_modules_to_backward_prefetch(const std::vector<UnitHandle>& units) const {
  lock(unit_)->set_backward_prefetch(references(units));
}
void UnitHandle::set_post_optim_event(cuda::Event event) const { lock(unit_)->context().set_post_optim_event(std::move(event)); }
void UnitHandle::reset_iter_state() const { lock(unit_)->context().reset_iteration(); }

std::vector<std::weak_ptr<engine::Unit>> UnitHandle::references(const std::vector<UnitHandle>& units) {
  std::vector<std::weak_ptr<engine::Unit>> result;
  for (auto& u : units) result.push_back(u.unit_);
  return result;
}
void UnitHandle::set_reshard_after_backward(bool value, bool recurse) const {
  for_each_unit(unit_, recurse, [&](Unit& u) { u.set_reshard_after_backward(value); });
}
void UnitHandle::set_is_last_backward(bool value) const { lock(unit_)->context().set_is_last_backward(value); }

std::vector<shard::ShardedParam> UnitHandle::parameters() const { return lock(unit_)->sharded_params(); }
UnitStats UnitHandle::stats() const { return lock(unit_)->stats(); }
void UnitHandle::reset_stats() const { lock(unit_)->stats() = {}; }
UnitMemory UnitHandle::memory() const { return lock(unit_)->memory(); }
std::string UnitHandle::plan(bool rows_by_rank) const { return lock(unit_)->plan(rows_by_rank); }

UnitHandle unit_of(const torch::nn::Module& module) {
  auto unit = engine::find_unit(&module);
  FSDPP_ENFORCE(unit != nullptr, UsageError, "fully_shard was not called on this module ({})", module.name());
  return UnitHandle(unit);
}

std::vector<UnitHandle> units(const torch::nn::Module& module) {
  std::vector<UnitHandle> result;
  for (auto& u : engine::find_units(module)) result.emplace_back(u);
  return result;
}

MemoryFormula memory_formula(const torch::nn::Module& module, bool accumulates) {
  std::vector<UnitMemory> memory;
  for (auto& u : engine::find_units(module)) {
    memory.push_back(u->memory(/*as_root=*/u->manages(&module)));
    bool holds_units = u->module() && engine::find_units(*u->module()).size() > 1;
    memory.back().keeps_gathered = memory.back().keeps_gathered || holds_units;  // gathered while the units inside it run
  }
  return memory_formula(memory, accumulates);
}

namespace {

// Of all pools of the meshes at or below `module`.
int64_t sum_over_pools(const torch::nn::Module& module, int64_t (engine::SlotPool::*bytes)() const noexcept) {
  int64_t sum = 0;
  for (auto& context : engine::contexts_of(engine::find_units(module)))
    for (auto* pool : {&context->gathered_pool(), &context->gradient_pool(), &context->staging_pool()}) sum += (pool->*bytes)();
  return sum;
}

}  // namespace

int64_t reserved_buffer_bytes(const torch::nn::Module& module) { return sum_over_pools(module, &engine::SlotPool::reserved_bytes); }
int64_t registered_buffer_bytes(const torch::nn::Module& module) { return sum_over_pools(module, &engine::SlotPool::registered_bytes); }

std::vector<shard::ShardedParam> sharded_parameters(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, shard::ShardedParam> by_handle;
  for (auto& u : engine::find_units(module))
    for (auto& p : u->sharded_params()) {
      auto* key = p.handle.unsafeGetTensorImpl();
      by_handle.emplace(key, std::move(p));
    }
  std::vector<shard::ShardedParam> result;
  for (auto& named : module.named_parameters(true)) {
    auto node = by_handle.extract(named.value().unsafeGetTensorImpl());
    if (node.empty()) continue;
    node.mapped().name = named.key();
    result.push_back(std::move(node.mapped()));
  }
  return result;
}

std::vector<shard::ShardedParam> sharded_parameters(const std::vector<at::Tensor>& parameters) {
  std::unordered_map<const Unit*, std::unordered_map<const c10::TensorImpl*, shard::ShardedParam>> by_unit;
  std::vector<shard::ShardedParam> result;
  for (const at::Tensor& parameter : parameters) {
    auto unit = engine::find_unit(parameter);
    if (!unit) continue;
    auto [entry, is_new] = by_unit.try_emplace(unit.get());
    if (is_new)
      for (auto& p : unit->sharded_params()) {
        auto* key = p.handle.unsafeGetTensorImpl();
        entry->second.emplace(key, std::move(p));
      }
    if (auto node = entry->second.extract(parameter.unsafeGetTensorImpl()); !node.empty()) result.push_back(std::move(node.mapped()));
  }
  return result;
}

}  // namespace fsdpp

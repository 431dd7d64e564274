#include "engine/registry.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

struct ModuleEntry {
  std::weak_ptr<Unit> unit;
  std::shared_ptr<Unit> owned;  ///< set for units without parameters
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, ModuleEntry> modules;
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<Unit>> parameters;
};

Registry& registry() {
  static auto* instance = new Registry;  // handles may outlive static destructors
  return *instance;
}

bool has_params(Unit& unit) {
  for (auto& b : unit.buffers())
    if (!b->params().empty()) return true;
  return false;
}

// A unit without parameters lives as long as one of the units inside its modules. False if there is none. REQUIRES: a lock.
bool owned_by_units_below(Registry& r, const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  bool owned = false;
  for (auto& root : modules)
    for (auto& m : root->modules(/*include_self=*/false)) {
      auto it = r.modules.find(m.get());
      auto below = it == r.modules.end() ? nullptr : it->second.unit.lock();
      if (!below || !has_params(*below)) continue;
      below->keep_alive(unit);
      owned = true;
    }
  return owned;
}

// Entries of dead modules and parameters. REQUIRES: exclusive lock. Returns the units to destroy after unlocking.
std::vector<std::shared_ptr<Unit>> sweep(Registry& r) {
  std::vector<std::shared_ptr<Unit>> dead;
  std::erase_if(r.modules, [&](auto& e) {
    auto unit = e.second.unit.lock();
    if (unit && unit->manages(e.first)) return false;
    if (e.second.owned) dead.push_back(std::move(e.second.owned));
    return true;
  });
  std::erase_if(r.parameters, [](auto& e) { return e.second.expired(); });
  return dead;
}

}  // namespace

void register_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  auto& r = registry();
  std::vector<std::shared_ptr<Unit>> dead;
  std::unique_lock lock(r.mutex);
  dead = sweep(r);
  bool own = !has_params(*unit) && !owned_by_units_below(r, unit, modules);
  for (auto& m : modules) r.modules[m.get()] = {unit, own ? unit : nullptr};
  for (auto& b : unit->buffers())
    for (auto& p : b->params()) r.parameters[p.handle().unsafeGetTensorImpl()] = unit;
  lock.unlock();
}

std::shared_ptr<Unit> find_unit(const torch::nn::Module* module) {
  auto& r = registry();
  std::shared_ptr<Unit> unit;
  {
    std::shared_lock lock(r.mutex);
    auto it = r.modules.find(module);
    if (it == r.modules.end()) return nullptr;
    unit = it->second.unit.lock();
  }
  return unit && unit->manages(module) ? unit : nullptr;
}

std::vector<std::shared_ptr<Unit>> find_units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> units;
  auto add = [&](const torch::nn::Module* m) {
    auto unit = find_unit(m);
    if (unit && std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(std::move(unit));
  };
  add(&module);
  for (auto& m : module.modules(/*include_self=*/false)) add(m.get());
  return units;
}

std::vector<std::shared_ptr<CommContext>> contexts_of(const std::vector<std::shared_ptr<Unit>>& units) {
  std::vector<std::shared_ptr<CommContext>> contexts;
  for (auto& unit : units) {
    auto context = unit->context().shared_from_this();
    if (std::find(contexts.begin(), contexts.end(), context) == contexts.end()) contexts.push_back(std::move(context));
  }
  return contexts;
}

std::shared_ptr<Unit> find_unit(const at::Tensor& parameter) {
  auto& r = registry();
  std::shared_lock lock(r.mutex);
  auto it = r.parameters.find(parameter.unsafeGetTensorImpl());
  return it == r.parameters.end() ? nullptr : it->second.lock();
}

}  // namespace fsdpp::engine

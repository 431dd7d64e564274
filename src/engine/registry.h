#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdpp::engine {

class CommContext;
class Unit;

/// Which unit a module, or a parameter, belongs to. Units are owned by their parameters (autograd_edges.h), one without
/// parameters by the units inside its modules, or, if there are none, by this registry until its module is gone and another unit is made. Thread-safe.
void register_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

/// nullptr if fully_shard was not called on the module.
[[nodiscard]] std::shared_ptr<Unit> find_unit(const torch::nn::Module* module);

/// All units at or below `module`, in module order, each once.
[[nodiscard]] std::vector<std::shared_ptr<Unit>> find_units(const torch::nn::Module& module);

/// Of these units, each once, in their order.
[[nodiscard]] std::vector<std::shared_ptr<CommContext>> contexts_of(const std::vector<std::shared_ptr<Unit>>& units);

/// The unit that manages a parameter, or nullptr.
[[nodiscard]] std::shared_ptr<Unit> find_unit(const at::Tensor& parameter);

}  // namespace fsdpp::engine

#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/shard/sharded_param.h"

namespace fsdpp::dcp {

/// A parameter or buffer of a model, once however many names it has.
struct ModelTensor {
  std::vector<std::string> names;  ///< the first one is its name in files; more where it is tied
  at::Tensor handle;
  std::optional<shard::ShardedParam> sharded;

  [[nodiscard]] const std::string& name() const { return names.front(); }
  [[nodiscard]] std::vector<int64_t> global_sizes() const { return sharded ? sharded->global_sizes : handle.sizes().vec(); }
};

struct ModelTensors {
  std::vector<ModelTensor> items;    ///< parameters in named_parameters() order, then buffers
  std::shared_ptr<comm::Mesh> mesh;  ///< null when nothing is sharded
};

/// Reshards units that are unsharded, so that every sharded handle shows its local shard. Throws CheckpointError if two
/// parameters lie on different meshes.
[[nodiscard]] ModelTensors collect_tensors(const torch::nn::Module& model);

}  // namespace fsdpp::dcp

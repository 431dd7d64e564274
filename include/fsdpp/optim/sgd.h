#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/optim/optimizer.h"

namespace fsdpp::optim {

/// Defaults are PyTorch's.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  /// Climbs instead of descending.
  bool maximize = false;
  /// As AdamWOptions::offload_state.
  bool offload_state = false;
};

/// Stochastic gradient descent, with a momentum buffer in fp32 (fp64 for fp64 parameters) where there is momentum.
/// Formula: see kernels::SGDArgs.
class FSDPP_API SGD : public Optimizer {
 public:
  /// All parameters of the model in one group.
  explicit SGD(const torch::nn::Module& model, SGDOptions options = {});
  explicit SGD(const std::vector<ParamGroup<SGDOptions>>& groups);

  /// Throws UsageError for a parameter that is in a group already, ConfigError for bad options.
  void add_group(const std::vector<at::Tensor>& params, const SGDOptions& options);
  [[nodiscard]] const SGDOptions& options(size_t group = 0) const;

  /// A view shaped like the local shard; undefined without momentum and before the first update of that parameter.
  /// Throws UsageError if `parameter` is not one of this optimizer's. Offloaded state: blocks the host until it is
  /// there.
  [[nodiscard]] at::Tensor momentum_buffer(const at::Tensor& parameter) const;
};

}  // namespace fsdpp::optim

#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/optim/optimizer.h"

namespace fsdpp::optim {

/// Defaults are PyTorch's.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  /// Divides by the largest second moment so far; one more state tensor.
  bool amsgrad = false;
  /// Climbs instead of descending.
  bool maximize = false;
  /// Keeps the state in host memory, page-locked where there is a GPU. A step takes it to the parameter's device and
  /// back in pieces, beside the update, through two pieces of 16 MiB (fp32) for each state tensor of a parameter.
  bool offload_state = false;
};

/// AdamW with fp32 moments (fp64 for fp64 parameters) and a step count per parameter. Formula: see kernels::AdamWArgs.
class FSDPP_API AdamW : public Optimizer {
 public:
  /// All parameters of the model in one group.
  explicit AdamW(const torch::nn::Module& model, AdamWOptions options = {});
  explicit AdamW(const std::vector<ParamGroup<AdamWOptions>>& groups);

  /// Throws UsageError for a parameter that is in a group already, ConfigError for bad options.
  void add_group(const std::vector<at::Tensor>& params, const AdamWOptions& options);
  [[nodiscard]] const AdamWOptions& options(size_t group = 0) const;

  /// State of one parameter: views shaped like the local shard; undefined before the first update of that parameter.
  struct ParamState {
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor max_exp_avg_sq;  ///< with amsgrad
    int64_t step = 0;
  };
  /// Throws UsageError if `parameter` is not one of this optimizer's. Offloaded state: blocks the host until it is
  /// there.
  [[nodiscard]] ParamState state(const at::Tensor& parameter) const;
};

}  // namespace fsdpp::optim

#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "fsdpp/shard/sharded_param.h"

namespace torch::nn {
class Module;
}

namespace fsdpp::optim {

struct PlainParam {
  std::string name;
  at::Tensor handle;
};

/// Parameters, each once: those that a unit shards, and the others.
struct ModelParams {
  std::vector<shard::ShardedParam> sharded;
  std::vector<PlainParam> plain;
};
[[nodiscard]] ModelParams collect_params(const torch::nn::Module& model);
[[nodiscard]] ModelParams collect_params(const std::vector<at::Tensor>& parameters);

/// The gradient of a parameter, on any device, undefined if there is none. Throws UsageError when it is sparse, of a
/// dtype without a kernel, or not shaped like `sizes`. `who` is the calling function, for the message.
[[nodiscard]] at::Tensor checked_grad(const char* who, const std::string& name, const at::Tensor& handle,
                                      at::IntArrayRef sizes);

}  // namespace fsdpp::optim

#include "optim/model_params.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <unordered_set>

#include "base/enforce.h"
#include "fsdpp/api/unit_handle.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

ModelParams split(std::vector<shard::ShardedParam> sharded, std::vector<PlainParam> all) {
  ModelParams params;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& p : sharded) seen.insert(p.handle.unsafeGetTensorImpl());
  params.sharded = std::move(sharded);
  for (PlainParam& p : all) {
    if (p.handle.defined() && seen.insert(p.handle.unsafeGetTensorImpl()).second) params.plain.push_back(std::move(p));
  }
  return params;
}

}  // namespace

ModelParams collect_params(const torch::nn::Module& model) {
  std::vector<PlainParam> all;
  for (const auto& item : model.named_parameters(/*recurse=*/true)) all.push_back({item.key(), item.value()});
  return split(sharded_parameters(model), std::move(all));
}

ModelParams collect_params(const std::vector<at::Tensor>& parameters) {
  std::vector<PlainParam> all;
  for (size_t i = 0; i < parameters.size(); ++i) all.push_back({fmt::format("number {}", i), parameters[i]});
  return split(sharded_parameters(parameters), std::move(all));
}

at::Tensor checked_grad(const char* who, const std::string& name, const at::Tensor& handle, at::IntArrayRef sizes) {
  const at::Tensor grad = handle.grad();
  if (!grad.defined()) return grad;
  FSDPP_ENFORCE(grad.layout() == c10::kStrided, UsageError,
                "{}: parameter '{}': expected a dense gradient, got a sparse one", who, name);
  FSDPP_ENFORCE(grad.sizes() == sizes, UsageError,
                "{}: parameter '{}': expected a gradient of shape [{}], got [{}]. Try: reshard() the unit first", who,
                name, fmt::join(sizes, ", "), fmt::join(grad.sizes(), ", "));
  FSDPP_ENFORCE(shard::has_kernel_dtype(grad.scalar_type()), UsageError,
                "{}: parameter '{}': expected a gradient of float32, float64, float16 or bfloat16, got {}", who, name,
                c10::toString(grad.scalar_type()));
  return grad;
}

}  // namespace fsdpp::optim

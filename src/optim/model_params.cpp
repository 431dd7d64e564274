#include "optim/model_params.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <unordered_set>

#include "base/enforce.h"
#include "fsdpp/api/unit_handle.h"
#include "optim/flat_range.h"

namespace fsdpp::optim {

ModelParams collect_params(const torch::nn::Module& model) {
  ModelParams params;
  params.sharded = sharded_parameters(model);
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& p : params.sharded) seen.insert(p.handle.unsafeGetTensorImpl());
  for (const auto& item : model.named_parameters(/*recurse=*/true)) {
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      params.plain.push_back({item.key(), item.value()});
    }
  }
  return params;
}

at::Tensor checked_grad(const char* who, const std::string& name, const at::Tensor& handle, at::IntArrayRef sizes) {
  const at::Tensor grad = handle.grad();
  if (!grad.defined()) return grad;
  FSDPP_ENFORCE(grad.layout() == c10::kStrided, UsageError,
                "{}: parameter '{}': expected a dense gradient, got a sparse one", who, name);
  FSDPP_ENFORCE(grad.sizes() == sizes, UsageError,
                "{}: parameter '{}': expected a gradient of shape [{}], got [{}]. Try: reshard() the unit first", who,
                name, fmt::join(sizes, ", "), fmt::join(grad.sizes(), ", "));
  FSDPP_ENFORCE(grad.device() == handle.device(), UsageError,
                "{}: parameter '{}': expected a gradient on {}, got one on {}", who, name, handle.device().str(),
                grad.device().str());
  FSDPP_ENFORCE(has_kernel_dtype(grad.scalar_type()), UsageError,
                "{}: parameter '{}': expected a gradient of float32, float64, float16 or bfloat16, got {}", who, name,
                c10::toString(grad.scalar_type()));
  return grad;
}

}  // namespace fsdpp::optim

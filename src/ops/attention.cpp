#include "fsdpp/ops/attention.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "base/enforce.h"
#include "ops/cudnn_attention.h"
#include "ops/kernel_use.h"
#include "ops/libtorch_attention.h"
#include "ops/matrix.h"

namespace fsdpp::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tensor may begin anywhere inside another one's memory.
at::Tensor dense_and_aligned(const at::Tensor& t) {
  auto result = dense(t);
  return is_aligned(result) ? result : result.clone();
}

struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv, const AttentionOptions& options) {
    auto result = cudnn_attention(qkv, options);
    context->save_for_backward({qkv, result.out, result.stats});
    context->set_materialize_grads(false);
    context->saved_data["heads"] = options.heads;
    context->saved_data["causal"] = options.causal;
    context->saved_data["scale"] = *options.scale;
    return result.out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    auto& data = context->saved_data;
    const AttentionOptions options{
        .heads = data["heads"].toInt(), .causal = data["causal"].toBool(), .scale = data["scale"].toDouble()};
    const auto saved = context->get_saved_variables();
    // The second: a mode that asks for deterministic kernels came after forward, and there are none.
    if (c10::GradMode::is_enabled() || !cudnn_takes(saved[0], options, true))
      return {libtorch_attention_gradient(saved[0], grads[0], options), {}};
    return {cudnn_attention_gradient(saved[0], {saved[1], saved[2]}, dense_and_aligned(grads[0]), options), {}};
  }
};

AttentionOptions checked(const at::Tensor& qkv, AttentionOptions options) {
  FSDPP_ENFORCE(qkv.defined() && at::isFloatingType(qkv.scalar_type()), UsageError,
                "attention: expected qkv of a floating dtype, got {}. Try: the result of the packed projection",
                qkv.defined() ? c10::toString(qkv.scalar_type()) : "an undefined tensor");
  FSDPP_ENFORCE(qkv.dim() >= 2, UsageError,
                "attention: expected qkv as [..., seq, 3 * dim], got [{}]. Try: unsqueeze(0)",
                fmt::join(qkv.sizes(), ", "));
  FSDPP_ENFORCE(
      options.heads >= 1 && qkv.size(-1) >= 1 && qkv.size(-1) % (3 * options.heads) == 0, UsageError,
      "attention: expected qkv as [..., seq, 3 * dim] and a number of heads that divides dim, got [{}] and {} heads. "
      "Try: query, "
      "key and value beside each other in each row, as one linear layer with a weight of [3 * dim, in] gives them",
      fmt::join(qkv.sizes(), ", "), options.heads);
  if (!options.scale) options.scale = 1 / std::sqrt(static_cast<double>(qkv.size(-1) / 3 / options.heads));
  return options;
}

}  // namespace

at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& given) {
  const auto options = checked(qkv, given);
  const auto packed = dense_and_aligned(qkv);
  const bool records = c10::GradMode::is_enabled() && packed.requires_grad();
  return cudnn_takes(packed, options, records) ? PackedAttention::apply(packed, options)
                                               : libtorch_attention(packed, options);
}

}  // namespace fsdpp::ops

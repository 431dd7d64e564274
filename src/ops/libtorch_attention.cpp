#include "ops/libtorch_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace fsdpp::ops {
namespace {

// Query, key and value as [batch, heads, seq, dim / heads].
std::vector<at::Tensor> by_head(const at::Tensor& qkv, int64_t heads) {
  const int64_t seq = qkv.size(-2), width = qkv.size(-1),
                batch = c10::multiply_integers(qkv.sizes().slice(0, qkv.dim() - 2));
  auto parts = qkv.view({batch, seq, width}).chunk(3, -1);
  for (auto& part : parts) part = part.view({batch, seq, heads, width / 3 / heads}).transpose(1, 2);
  return parts;
}

at::Tensor by_token(const at::Tensor& mixed, const at::Tensor& qkv) {
  auto sizes = qkv.sizes().vec();
  sizes.back() /= 3;
  return mixed.transpose(1, 2).reshape(sizes);
}

}  // namespace

at::Tensor libtorch_attention(const at::Tensor& qkv, const AttentionOptions& options) {
  const auto parts = by_head(qkv, options.heads);
  return by_token(
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, options.causal, options.scale), qkv);
}

at::Tensor libtorch_attention_gradient(const at::Tensor& qkv, const at::Tensor& grad_out,
                                       const AttentionOptions& options) {
  const bool again = c10::GradMode::is_enabled();
  const c10::AutoGradMode recording(true);
  const auto parts = by_head(qkv, options.heads);
  const auto mixed =
      at::_scaled_dot_product_attention_math(parts[0], parts[1], parts[2], {}, 0.0, options.causal, {}, options.scale);
  return torch::autograd::grad({by_token(std::get<0>(mixed), qkv)}, {qkv}, {grad_out}, {}, /*create_graph=*/again)[0];
}

}  // namespace fsdpp::ops

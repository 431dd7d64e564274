#include "model.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>
#include <torch/nn/options/linear.h>

#include "fsdpp/api/checkpoint.h"
#include "fsdpp/base/error.h"
#include "fsdpp/ops/activation.h"
#include "fsdpp/ops/attention.h"
#include "fsdpp/ops/cross_entropy.h"
#include "fsdpp/ops/embedding.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/ops/mlp.h"
#include "fsdpp/ops/rms_norm.h"
#include "fsdpp/ops/rms_norm_linear.h"

namespace minillm {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool fused) {
  return fused ? fsdpp::ops::linear(x, weight, bias) : at::linear(x, weight, bias);
}

}  // namespace

RMSNormImpl::RMSNormImpl(const ModelConfig& config) : fused(config.fused), again(config.recompute_norms) { weight = register_parameter("weight", at::ones({config.dim})); }

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  return fused ? fsdpp::ops::rms_norm(x, weight) : at::rms_norm(x, {x.size(-1)}, weight);
}

std::pair<at::Tensor, at::Tensor> RMSNormImpl::add(const Residual& stream) {
  if (fused && stream.delta) {
    auto [normed, sum] = fsdpp::ops::add_rms_norm(*stream.delta, stream.sum, weight);
    return {normed, sum};
  }
  const auto total = stream.total();
  return {forward(total), total};
}

std::pair<at::Tensor, at::Tensor> RMSNormImpl::add_then_linear(const Residual& stream, const at::Tensor& to,
                                                               const at::Tensor& bias) {
  if (!(fused && again)) {
    const auto [normed, total] = add(stream);
    return {product(normed, to, bias, fused), total};
  }
  fsdpp::ops::RmsNormLinearArgs args{
      .x = stream.sum, .residual = {}, .norm_weight = weight, .weight = to, .bias = bias, .parts = 1, .eps = {}};
  if (stream.delta) args.x = *stream.delta, args.residual = stream.sum;
  auto result = fsdpp::ops::rms_norm_linear(args);
  return {result.parts[0], result.sum};
}

AttentionImpl::AttentionImpl(const ModelConfig& config) : heads(config.heads), fused(config.fused) {
  const auto dim = config.dim;
  in_proj_weight = register_parameter("in_proj_weight", at::empty({3 * dim, dim}));
  in_proj_bias = register_parameter("in_proj_bias", at::zeros({3 * dim}));
  out_proj = register_module("out_proj", linear(dim, dim, true));
  torch::nn::init::xavier_uniform_(in_proj_weight);
  torch::nn::init::zeros_(out_proj->bias);
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) { return mix(product(x, in_proj_weight, in_proj_bias, fused)); }

at::Tensor AttentionImpl::mix(const at::Tensor& qkv) {
  if (fused) return fsdpp::ops::linear(fsdpp::ops::attention(qkv, {.heads = heads}), out_proj->weight, out_proj->bias);
  const auto batch = qkv.size(0), seq = qkv.size(1), dim = qkv.size(2) / 3;
  auto parts = qkv.chunk(3, -1);
  for (auto& t : parts) t = t.view({batch, seq, heads, dim / heads}).transpose(1, 2);  // (B, H, T, D/H)
  const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
  return out_proj(mixed.transpose(1, 2).reshape({batch, seq, dim}));
}

FeedForwardImpl::FeedForwardImpl(const ModelConfig& config) : fused(config.fused) {
  up = register_module("0", linear(config.dim, 4 * config.dim, false));
  down = register_module("2", linear(4 * config.dim, config.dim, false));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  return fused ? fsdpp::ops::silu_mlp(x, up->weight, down->weight) : after_up(up(x));
}

at::Tensor FeedForwardImpl::after_up(const at::Tensor& h) {
  return fused ? fsdpp::ops::silu_linear(h, down->weight) : down(at::silu(h));
}

BlockImpl::BlockImpl(const ModelConfig& config) {
  norm1 = register_module("norm1", RMSNorm(config));
  attn = register_module("attn", Attention(config));
  norm2 = register_module("norm2", RMSNorm(config));
  ffn = register_module("ffn", FeedForward(config));
}

Residual BlockImpl::forward(const Residual& stream) {
  const auto [qkv, sum] = norm1->add_then_linear(stream, attn->in_proj_weight, attn->in_proj_bias);
  const Residual mixed{sum, attn->mix(qkv)};
  if (norm2->again) {
    const auto [up, next] = norm2->add_then_linear(mixed, ffn->up->weight, {});
    return {next, ffn->after_up(up)};
  }
  const auto [normed, next] = norm2->add(mixed);
  return {next, ffn(normed)};
}

MiniLLMImpl::MiniLLMImpl(const ModelConfig& config) : recompute(config.recompute), fused(config.fused) {
  if (config.heads < 1 || config.dim % config.heads != 0)
    throw fsdpp::ConfigError("--dim must be a multiple of --heads, got " + std::to_string(config.dim) + " and " +
                             std::to_string(config.heads));
  embed = register_module("embed", torch::nn::Embedding(config.vocab, config.dim));
  register_module("layers", layers);
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.emplace_back(config);
    layers->push_back(blocks.back());
  }
  head = register_module("head", linear(config.dim, config.vocab, false));
}

at::Tensor MiniLLMImpl::hidden(const at::Tensor& tokens) {
  auto of_embed = [this](const at::Tensor& ids) { return fused ? fsdpp::ops::embedding(ids, embed->weight) : embed->forward(ids); };
  Residual stream{fsdpp::call_as(*embed, of_embed, tokens), std::nullopt};
  for (auto& block : blocks) stream = recompute ? fsdpp::checkpoint(block, Residual{stream.total(), std::nullopt}) : block(stream);
  return stream.total();
}

at::Tensor MiniLLMImpl::forward(at::Tensor tokens) { return head(hidden(tokens)); }

at::Tensor MiniLLMImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  auto of_head = [this](const at::Tensor& x, const at::Tensor& wanted) {
    return fused ? fsdpp::ops::linear_cross_entropy(x, head->weight, wanted) : mean_loss(head->forward(x), wanted);
  };
  return fsdpp::call_as(*head, of_head, hidden(tokens), targets);
}

at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets) {
  const auto losses = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), {}, at::Reduction::None);
  return losses.to(at::kFloat).mean();
}

at::Tensor mean_loss(MiniLLM& model, const at::Tensor& tokens, const at::Tensor& targets) {
  auto loss = [&](const at::Tensor& t, const at::Tensor& wanted) { return model->loss(t, wanted); };
  return fsdpp::call_as(*model, loss, tokens, targets);
}

std::vector<NamedShape> block_shapes(const ModelConfig& config) {
  const auto d = config.dim;
  return {{"norm1.weight", {d}},           {"attn.in_proj_weight", {3 * d, d}}, {"attn.in_proj_bias", {3 * d}},
          {"attn.out_proj.weight", {d, d}}, {"attn.out_proj.bias", {d}},         {"norm2.weight", {d}},
          {"ffn.0.weight", {4 * d, d}},     {"ffn.2.weight", {d, 4 * d}}};
}

std::vector<NamedShape> vocabulary_shapes(const ModelConfig& config) { return {{"weight", {config.vocab, config.dim}}}; }

int64_t parameter_count(const ModelConfig& config) {
  auto count = [](const std::vector<NamedShape>& shapes) {
    int64_t total = 0;
    for (const auto& shape : shapes) {
      int64_t numel = 1;
      for (auto size : shape.sizes) numel *= size;
      total += numel;
    }
    return total;
  };
  return config.layers * count(block_shapes(config)) + 2 * count(vocabulary_shapes(config));
}

double flops_per_token(const ModelConfig& config, int64_t seq) {
  const auto multiplying = static_cast<double>(parameter_count(config) - config.vocab * config.dim);
  return 6.0 * multiplying + 12.0 * static_cast<double>(config.layers * config.dim * seq);
}

}  // namespace minillm

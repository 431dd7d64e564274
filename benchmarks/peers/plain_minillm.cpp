#include "peers/plain_minillm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/TensorOperators.h>

#include <stdexcept>

#if FSDPP_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace bench {

PlainMiniLLM::PlainMiniLLM(const PlainConfig& config, const std::map<std::string, at::Tensor>& weights) : config_(config) {
  embed_ = take(weights, "embed.weight");
  for (int64_t i = 0; i < config.layers; ++i) {
    const auto of = [&](const char* name) { return take(weights, "layers." + std::to_string(i) + "." + name); };
    layers_.push_back({of("norm1.weight"), of("attn.in_proj_weight"), of("attn.in_proj_bias"), of("attn.out_proj.weight"),
                       of("attn.out_proj.bias"), of("norm2.weight"), of("ffn.0.weight"), of("ffn.2.weight")});
  }
  head_ = take(weights, "head.weight");
}

at::Tensor PlainMiniLLM::take(const std::map<std::string, at::Tensor>& weights, const std::string& name) {
  const auto& weight = weights.at(name);
  masters_.push_back(weight.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  params_.push_back(weight.detach().to(config_.dtype, /*non_blocking=*/false, /*copy=*/true).requires_grad_());
  first_.push_back(at::zeros_like(masters_.back()));
  second_.push_back(at::zeros_like(masters_.back()));
  counts_.push_back(at::zeros({}, masters_.back().options()));
  return params_.back();
}

at::Tensor PlainMiniLLM::forward(const Layer& l, const at::Tensor& x) const {
  const auto batch = x.size(0), seq = x.size(1), dim = x.size(2);
  const auto qkv = at::linear(at::rms_norm(x, {dim}, l.norm1), l.qkv, l.qkv_bias)
                       .view({batch, seq, 3, config_.heads, dim / config_.heads})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]).transpose(1, 2).reshape({batch, seq, dim});
  const auto y = x + at::linear(mixed, l.out, l.out_bias);
  return y + at::linear(at::silu(at::linear(at::rms_norm(y, {dim}, l.norm2), l.up)), l.down);
}

void PlainMiniLLM::drop_gradients() {
  for (auto& p : params_) p.mutable_grad() = at::Tensor();
}

void PlainMiniLLM::update() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients, weights;
  for (const auto& p : params_) {
    gradients.push_back(p.grad().to(at::kFloat));
    weights.push_back(p.detach());
  }
  at::_foreach_add_(counts_, 1);
  at::_fused_adamw_(masters_, gradients, first_, second_, {}, counts_, config_.lr, 0.9, 0.999, 0.01, config_.eps, false, false);
  at::_foreach_copy_(weights, masters_);
}

at::Tensor PlainMiniLLM::step(const at::Tensor& inputs, const at::Tensor& targets) {
  drop_gradients();
  auto x = at::embedding(embed_, inputs);
  for (const auto& layer : layers_) x = forward(layer, x);
  const auto logits = at::linear(x, head_);
  const auto loss = at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.view({-1}));
  loss.backward();
  update();
  return loss.detach();
}

#if FSDPP_CUDA
struct PlainGraph::Graph {
  at::cuda::CUDAGraph graph;
};

PlainGraph::PlainGraph(PlainMiniLLM& model, const at::Tensor& inputs, const at::Tensor& targets)
    : graph_(std::make_unique<Graph>()), inputs_(inputs.clone()), targets_(targets.clone()) {
  const auto before = c10::cuda::getCurrentCUDAStream();
  before.synchronize();
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (int i = 0; i < 3; ++i) model.step(inputs_, targets_);
  stream.synchronize();
  model.drop_gradients();
  graph_->graph.capture_begin();
  loss_ = model.step(inputs_, targets_);
  graph_->graph.capture_end();
}

at::Tensor PlainGraph::step(const at::Tensor& inputs, const at::Tensor& targets) {
  inputs_.copy_(inputs);
  targets_.copy_(targets);
  graph_->graph.replay();
  return loss_;
}
#else
struct PlainGraph::Graph {};
PlainGraph::PlainGraph(PlainMiniLLM&, const at::Tensor&, const at::Tensor&) {
  throw std::runtime_error("a CUDA graph needs a build with CUDA");
}
at::Tensor PlainGraph::step(const at::Tensor&, const at::Tensor&) { return loss_; }
#endif

PlainGraph::~PlainGraph() = default;

}  // namespace bench

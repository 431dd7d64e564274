#pragma once
// MiniLLM: a small transformer with the architecture and the parameter names of the Python script in benchmarks/peers.
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/api/module_holder.h"

namespace minillm {

using fsdpp::Hooked;

struct ModelConfig {
  int64_t vocab = 32000;
  int64_t dim = 2048;
  int64_t layers = 12;
  int64_t heads = 16;  // divides dim
  bool recompute = false;  // keep the input of each block only and compute the rest again in backward
  bool fused = true;       // fsdpp::ops: fused kernels and gradients in place; else LibTorch's operators, one by one
  bool recompute_norms = false;  // fused: don't keep the results of norms, make them again in backward
};

/// The residual stream between blocks: a sum, and what is still to be added to it, by the norm that reads it next.
struct Residual {
  at::Tensor sum;                   // (B, T, D)
  std::optional<at::Tensor> delta;  // (B, T, D)
  [[nodiscard]] at::Tensor total() const { return delta ? sum + *delta : sum; }
};
template <class F>
void visit_tensors(Residual& r, F&& f) {
  f(r.sum);
  if (r.delta) f(*r.delta);
}

/// y = x / sqrt(mean(x²) + eps) · weight over the last dimension; eps is that of the dtype it computes in, as torch.nn.RMSNorm's.
struct RMSNormImpl : torch::nn::Module {
  explicit RMSNormImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);  // (B, T, D) → (B, T, D)
  std::pair<at::Tensor, at::Tensor> add(const Residual& stream);  // {the stream's total normed, the total}
  /// {the stream's total normed, then linear; the total}
  std::pair<at::Tensor, at::Tensor> add_then_linear(const Residual& stream, const at::Tensor& to,
                                                    const at::Tensor& bias);
  at::Tensor weight;  // (D)
  bool fused, again;
};
TORCH_MODULE(RMSNorm);

/// Self-attention over the whole sequence (no mask) with the parameters of torch.nn.MultiheadAttention.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);  // (B, T, D) → (B, T, D)
  at::Tensor mix(const at::Tensor& qkv);    // (B, T, 3·D): query, key, value, the projected x → (B, T, D)
  int64_t heads;
  bool fused;
  at::Tensor in_proj_weight;  // (3·D, D): query, key, value
  at::Tensor in_proj_bias;    // (3·D)
  torch::nn::Linear out_proj{nullptr};
};
TORCH_MODULE(Attention);

/// Linear to 4·D, SiLU, Linear back; named "0" and "2" as in the Sequential of the Python script.
struct FeedForwardImpl : torch::nn::Module {
  explicit FeedForwardImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);  // (B, T, D) → (B, T, D)
  at::Tensor after_up(const at::Tensor& h);  // (B, T, 4·D) → (B, T, D)
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool fused;
};
TORCH_MODULE(FeedForward);

/// The unit of sharding: FSDPP_MODULE makes `block(x)` gather and free its parameters around the call.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const ModelConfig& config);
  Residual forward(const Residual& stream);
  RMSNorm norm1{nullptr}, norm2{nullptr};
  Attention attn{nullptr};
  FeedForward ffn{nullptr};
};
FSDPP_MODULE(Block);

struct MiniLLMImpl : torch::nn::Module {
  explicit MiniLLMImpl(const ModelConfig& config);
  at::Tensor forward(at::Tensor tokens);  // (B, T) int64 → logits (B, T, vocab)
  /// Mean cross entropy as an fp32 scalar; fused: without the logits ever whole in memory. Called through mean_loss(). The head is
  /// called with the loss in it, so that backward is done with the head before it reaches the blocks.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
  at::Tensor hidden(const at::Tensor& tokens);  // (B, T) int64 → (B, T, D)
  Hooked<torch::nn::Embedding> embed{nullptr};  // units of their own, as the blocks are: the model itself keeps no parameters
  torch::nn::ModuleList layers;
  std::vector<Block> blocks;  // the same modules as `layers`, callable
  bool recompute, fused;
  Hooked<torch::nn::Linear> head{nullptr};
};
FSDPP_MODULE(MiniLLM);

/// Mean cross entropy as an fp32 scalar, also for 16-bit logits. targets: (B, T) int64.
at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets);
/// The model's loss, by a call of the model through its unit.
at::Tensor mean_loss(MiniLLM& model, const at::Tensor& tokens, const at::Tensor& targets);

struct NamedShape {
  std::string name;
  std::vector<int64_t> sizes;
};
/// Names and shapes of the parameters of one unit, below it, without building it: a block; embedding and head, which are alike.
std::vector<NamedShape> block_shapes(const ModelConfig& config);
std::vector<NamedShape> vocabulary_shapes(const ModelConfig& config);

int64_t parameter_count(const ModelConfig& config);

/// Floating-point operations of one training step on one token: 6 for each parameter that multiplies (all but the embedding)
/// plus 12·layers·dim·seq for attention. Recomputation does not count.
double flops_per_token(const ModelConfig& config, int64_t seq);

}  // namespace minillm

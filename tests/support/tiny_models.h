#pragma once
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/embedding.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdpp/api/fully_shard.h"

namespace fsdpp::test {

/// x + down(gelu(up(norm · x))): sizes that no world size divides.
struct TinyBlockImpl : torch::nn::Module {
  explicit TinyBlockImpl(int64_t dim, int64_t hidden = 15) {
    scale = register_parameter("scale", at::ones({dim}));
    up = register_module("up", torch::nn::Linear(dim, hidden));
    down = register_module("down", torch::nn::Linear(hidden, dim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(at::layer_norm(x, {x.size(-1)}, scale)))); }
  at::Tensor scale;
  torch::nn::Linear up{nullptr}, down{nullptr};
};
FSDPP_MODULE(TinyBlock);

/// Embedding, blocks, head: every block and the root become units.
struct TinyNetImpl : torch::nn::Module {
  TinyNetImpl(int64_t vocab, int64_t dim, int blocks_count) {
    embed = register_module("embed", torch::nn::Embedding(vocab, dim));
    for (int i = 0; i < blocks_count; ++i) blocks.push_back(register_module("block" + std::to_string(i), TinyBlock(dim)));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(dim, vocab).bias(false)));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = embed(ids);
    for (auto& b : blocks) x = b(x);
    return head(x);
  }
  torch::nn::Embedding embed{nullptr};
  std::vector<TinyBlock> blocks;
  torch::nn::Linear head{nullptr};
};
FSDPP_MODULE(TinyNet);

/// Weights by a generator of their own, so that ranks as threads do not share random state.
inline void fill_parameters(torch::nn::Module& module, uint64_t seed) {
  at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : module.parameters()) p.copy_(at::randn(p.sizes(), generator, p.options().device(at::kCPU).dtype(at::kFloat)) * 0.3);
}

inline TinyNet make_tiny_net(uint64_t seed = 1, int blocks = 3, int64_t vocab = 23, int64_t dim = 7) {
  TinyNet net(vocab, dim, blocks);
  fill_parameters(*net, seed);
  return net;
}

/// Blocks as units, then the root.
inline void shard_tiny_net(TinyNet& net, const std::shared_ptr<comm::Mesh>& mesh, const FullyShardOptions& block_options = {},
                           const FullyShardOptions& root_options = {}) {
  for (auto& b : net->blocks) fully_shard(b, mesh, block_options);
  fully_shard(net, mesh, root_options);
}

/// Token ids [batch, length] of one rank and step; the same on every machine.
inline at::Tensor tokens(uint64_t seed, int64_t vocab = 23, int64_t batch = 2, int64_t length = 5) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randint(0, vocab, {batch, length}, generator, at::kLong);
}

inline at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& ids) {
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}).to(at::kFloat), ids.view({-1}));
}

inline double relative_error(const at::Tensor& a, const at::Tensor& b) {
  auto x = a.to(at::kDouble), y = b.to(at::kDouble);
  return ((x - y).norm() / (y.norm() + 1e-30)).item<double>();
}

}  // namespace fsdpp::test

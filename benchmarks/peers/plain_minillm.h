#pragma once
// The peer without sharding: MiniLLM in plain LibTorch operations on one device, 16-bit weights beside fp32 masters, LibTorch's
// own fused AdamW; eager, or the whole step in one CUDA graph. What a sharding engine could at best add nothing to. Independent
// of fsdpp.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace bench {

struct PlainConfig {
  int64_t layers = 12, heads = 16;
  double lr = 3e-4, eps = 1e-8;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;  ///< of weights and computation
};

class PlainMiniLLM {
 public:
  /// `weights`: fp32, named as in the training script ("embed.weight", "layers.0.norm1.weight", …), on the device to train on.
  PlainMiniLLM(const PlainConfig& config, const std::map<std::string, at::Tensor>& weights);
  /// Queues one optimizer step on the current stream. inputs, targets: (B, T) int64 on the device. Returns the loss.
  at::Tensor step(const at::Tensor& inputs, const at::Tensor& targets);
  /// Drops the gradients, so that a capture starts without any.
  void drop_gradients();

 private:
  struct Layer {
    at::Tensor norm1, qkv, qkv_bias, out, out_bias, norm2, up, down;
  };
  at::Tensor take(const std::map<std::string, at::Tensor>& weights, const std::string& name);
  [[nodiscard]] at::Tensor forward(const Layer& layer, const at::Tensor& x) const;
  void update();

  PlainConfig config_;
  at::Tensor embed_, head_;
  std::vector<Layer> layers_;
  std::vector<at::Tensor> params_, masters_, first_, second_, counts_;
};

/// The whole step captured once and replayed.
class PlainGraph {
 public:
  /// Takes some steps on these tokens first, then captures. Throws without CUDA.
  PlainGraph(PlainMiniLLM& model, const at::Tensor& inputs, const at::Tensor& targets);
  ~PlainGraph();
  /// Copies the tokens to where the graph reads them and queues the graph on the current stream.
  at::Tensor step(const at::Tensor& inputs, const at::Tensor& targets);

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
  at::Tensor inputs_, targets_, loss_;
};

}  // namespace bench

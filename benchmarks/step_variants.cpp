#include "step_variants.h"

#include <ATen/autocast_mode.h>

#include "fsdpp/base/error.h"
#include "peers/plain_minillm.h"
#include "trainer.h"

namespace bench {
namespace {

using minillm::Batch;
using minillm::Precision;

/// As torch.autocast: fp32 weights, products in bf16.
class Autocast {
 public:
  Autocast(c10::DeviceType device, bool enabled) : device_(device), enabled_(enabled) {
    if (!enabled_) return;
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, true);
  }
  ~Autocast() {
    if (!enabled_) return;
    at::autocast::set_autocast_enabled(device_, false);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_;
};

/// minillm's model and optimizer, as its training loop uses them.
class MiniLLMStepper final : public Stepper {
 public:
  MiniLLMStepper(const minillm::Options& options, const minillm::Place& place)
      : device_(place.device.type()), autocast_(!place.mesh && options.precision == Precision::BF16),
        model_(minillm::build_model(options, place)), optimizer_(*model_, {.lr = options.lr, .eps = options.adam_eps}) {}

  at::Tensor step(const Batch& batch) override {
    optimizer_.zero_grad();
    const auto loss = forward(batch);
    loss.backward();
    optimizer_.step();
    return loss.detach();
  }

 private:
  at::Tensor forward(const Batch& batch) {
    const Autocast autocast(device_, autocast_);
    return minillm::mean_loss(model_(batch.inputs), batch.targets);
  }

  c10::DeviceType device_;
  bool autocast_;
  minillm::MiniLLM model_;
  fsdpp::optim::AdamW optimizer_;
};

minillm::Place alone(const minillm::Place& place) { return {nullptr, place.device, 0, 1}; }

/// The same first weights as minillm's model.
PlainMiniLLM make_plain(const Setup& setup) {
  const auto model = minillm::build_model(setup.options, alone(setup.place));
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value();
  PlainConfig config{.layers = setup.options.model.layers, .heads = setup.options.model.heads, .lr = setup.options.lr,
                     .eps = setup.options.adam_eps};
  config.dtype = setup.options.precision == Precision::BF16 ? at::kBFloat16 : at::kFloat;
  return {config, weights};
}

class PlainStepper final : public Stepper {
 public:
  explicit PlainStepper(const Setup& setup) : model_(make_plain(setup)) {}
  at::Tensor step(const Batch& batch) override { return model_.step(batch.inputs, batch.targets); }

 private:
  PlainMiniLLM model_;
};

class PlainGraphStepper final : public Stepper {
 public:
  explicit PlainGraphStepper(const Setup& setup) : model_(make_plain(setup)), graph_(model_, setup.batch.inputs, setup.batch.targets) {}
  at::Tensor step(const Batch& batch) override { return graph_.step(batch.inputs, batch.targets); }

 private:
  PlainMiniLLM model_;
  PlainGraph graph_;
};

}  // namespace

const std::vector<Variant>& step_variants() {
  static const std::vector<Variant> all{
      {.name = "sharded", .what = "fully_shard of every block and the root, fsdpp's AdamW", .sharded = true,
       .make = [](const Setup& s) { return std::make_unique<MiniLLMStepper>(s.options, s.place); }},
      {.name = "plain", .what = "plain LibTorch, bf16 weights, LibTorch's fused AdamW on fp32 masters",
       .make = [](const Setup& s) { return std::make_unique<PlainStepper>(s); }},
      {.name = "autocast", .what = "minillm --no-shard: autocast, fsdpp's AdamW",
       .make = [](const Setup& s) { return std::make_unique<MiniLLMStepper>(s.options, alone(s.place)); }},
      {.name = "plain-graph", .what = "as plain, the whole step in one CUDA graph", .cuda_only = true, .steps_when_made = 3,
       .make = [](const Setup& s) { return std::make_unique<PlainGraphStepper>(s); }},
  };
  return all;
}

const Variant& step_variant(const std::string& name) {
  std::string known;
  for (const auto& variant : step_variants()) {
    if (variant.name == name) return variant;
    known += " " + variant.name;
  }
  throw fsdpp::ConfigError("bench_step: unknown variant '" + name + "'. Known:" + known);
}

}  // namespace bench

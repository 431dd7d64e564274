#include "step_variants.h"

#include "autocast.h"
#include "fsdpp/api/unit_handle.h"
#include "fsdpp/base/error.h"
#include "peers/plain_minillm.h"
#include "trainer.h"

namespace bench {
namespace {

using minillm::Autocast;
using minillm::Batch;
using minillm::Precision;

constexpr fsdpp::comm::MeshOptions kSymmetric{.symmetric_buffers = true};
constexpr fsdpp::comm::MeshOptions kCopyEngine{.symmetric_buffers = true, .copy_engine_gathers = true};

/// minillm's model and optimizer, as its training loop uses them.
class MiniLLMStepper final : public Stepper {
 public:
  MiniLLMStepper(const minillm::Options& options, const minillm::Place& place)
      : device_(place.device.type()), autocast_(!place.mesh && options.precision == Precision::BF16),
        model_(minillm::build_model(options, place)), optimizer_(*model_, {.lr = options.lr, .eps = options.adam_eps}) {
    if (options.step_in_backward) optimizer_.step_in_backward(*model_);
    if (options.graph) graph_.emplace(*model_, [this] { return step_on(static_); });
  }

  at::Tensor step(const Batch& batch) override {
    if (!graph_) return step_on(batch);
    if (static_.inputs.defined()) {
      static_.inputs.copy_(batch.inputs);
      static_.targets.copy_(batch.targets);
    } else {
      static_ = {batch.inputs.clone(), batch.targets.clone()};
    }
    return (*graph_)();
  }
  int64_t registered_bytes() const override { return fsdpp::registered_buffer_bytes(*model_); }

 private:
  at::Tensor step_on(const Batch& batch) {
    optimizer_.zero_grad();
    const auto loss = forward(batch);
    loss.backward();
    optimizer_.step();
    return loss.detach();
  }

  at::Tensor forward(const Batch& batch) {
    const Autocast autocast(device_, autocast_);
    return minillm::mean_loss(model_, batch.inputs, batch.targets);
  }

  c10::DeviceType device_;
  bool autocast_;
  minillm::MiniLLM model_;
  fsdpp::optim::AdamW optimizer_;
  Batch static_;
  std::optional<fsdpp::StepGraph> graph_;
};

/// With a mesh of its own, so that variants share neither buffers nor the recorded order of units.
minillm::Place own_place(const minillm::Place& place, const std::string& name, const fsdpp::comm::MeshOptions& options) {
  const std::shared_ptr<fsdpp::comm::World> world(&place.mesh->world(), [](auto*) {});  // place.mesh outlives the variants
  return {fsdpp::comm::Mesh::hybrid(world, place.mesh->replicate_size(), name, options), place.device, place.rank,
          place.world_size};
}

/// minillm with some of its flags.
struct Flags {
  bool fused = true, in_backward = false, keep_cast = false, graph = false, recompute_norms = false,
       reduce_bf16 = false;
  fsdpp::comm::MeshOptions mesh = {};
};
std::unique_ptr<Stepper> make_minillm(const Setup& setup, const minillm::Place& place, const Flags& flags) {
  auto options = setup.options;
  options.model.fused = flags.fused;
  options.model.recompute_norms = flags.recompute_norms;
  options.step_in_backward = flags.in_backward;
  options.keep_cast_shard = flags.keep_cast;
  options.graph = flags.graph;
  options.reduce_bf16 = flags.reduce_bf16 && options.precision == Precision::BF16;
  return std::make_unique<MiniLLMStepper>(options, place);
}
Variant sharded(std::string name, std::string what, const Flags& flags) {
  return {.name = name, .what = std::move(what), .sharded = true, .only_by_name = flags.mesh.symmetric_buffers,
          .make = [name, flags](const Setup& s) { return make_minillm(s, own_place(s.place, name, flags.mesh), flags); }};
}

minillm::Place alone(const minillm::Place& place) { return {nullptr, place.device, 0, 1}; }

/// The same first weights as minillm's model.
PlainMiniLLM make_plain(const Setup& setup) {
  const auto model = minillm::build_model(setup.options, alone(setup.place));  // for its weights alone
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model->named_parameters()) weights[item.key()] = item.value();
  PlainConfig config{.layers = setup.options.model.layers,
                     .heads = setup.options.model.heads,
                     .lr = setup.options.lr,
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
  explicit PlainGraphStepper(const Setup& setup)
      : model_(make_plain(setup)), graph_(model_, setup.batch.inputs, setup.batch.targets) {}
  at::Tensor step(const Batch& batch) override { return graph_.step(batch.inputs, batch.targets); }

 private:
  PlainMiniLLM model_;
  PlainGraph graph_;
};

}  // namespace

const std::vector<Variant>& step_variants() {
  static const std::vector<Variant> all{
      sharded("sharded", "fully_shard of every block and the root, fsdpp's operators and AdamW", {}),
      sharded("sharded-plain-ops", "as sharded, with LibTorch's operators", {.fused = false}),
      sharded("sharded-lean", "as sharded, updates inside backward, norms made again there: the least memory",
              {.in_backward = true, .recompute_norms = true}),
      sharded("sharded-fast", "as sharded, updates inside backward, the shards kept in bf16 too",
              {.in_backward = true, .keep_cast = true}),
      sharded("sharded-graph", "as fast, the whole step in one CUDA graph",
              {.in_backward = true, .keep_cast = true, .graph = true}),
      sharded("sharded-bf16",
              "as fast, gradients reduced in bf16; on one rank stored so, as FSDP2's whatever it reduces in",
              {.in_backward = true, .keep_cast = true, .reduce_bf16 = true}),
      sharded("sharded-bf16-graph", "as bf16, the whole step in one CUDA graph",
              {.in_backward = true, .keep_cast = true, .graph = true, .reduce_bf16 = true}),
      sharded("sharded-symmetric", "as fast, with symmetric buffers",
              {.in_backward = true, .keep_cast = true, .mesh = kSymmetric}),
      sharded("sharded-copy-engine", "as symmetric, gathers by copy engines",
              {.in_backward = true, .keep_cast = true, .mesh = kCopyEngine}),
      sharded("sharded-symmetric-graph", "as symmetric, the whole step in one CUDA graph",
              {.in_backward = true, .keep_cast = true, .graph = true, .mesh = kSymmetric}),
      {.name = "plain",
       .what = "plain LibTorch, bf16 weights, LibTorch's fused AdamW on fp32 masters",
       .make = [](const Setup& s) { return std::make_unique<PlainStepper>(s); }},
      {.name = "autocast",
       .what = "minillm --no-shard: autocast, fsdpp's AdamW",
       .make = [](const Setup& s) { return make_minillm(s, alone(s.place), {.fused = false}); }},
      {.name = "plain-graph",
       .what = "as plain, the whole step in one CUDA graph",
       .cuda_only = true,
       .steps_when_made = 3,
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

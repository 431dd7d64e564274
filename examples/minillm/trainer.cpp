#include "trainer.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>

#include "autocast.h"
#include "device.h"
#include "fsdpp/api/deferred_init.h"
#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/rank_env.h"
#include "fsdpp/checkpoint/full_state.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "fsdpp/profiler/known_memory.h"
#include "text.h"

namespace minillm {
namespace {

using Clock = std::chrono::steady_clock;

fsdpp::FullyShardOptions shard_options(const Options& options) {
  fsdpp::FullyShardOptions result;
  result.keep_cast_shard = options.keep_cast_shard;
  if (options.precision == Precision::FP32) return result;
  result.mp_policy.param_dtype = at::kBFloat16;
  result.mp_policy.reduce_dtype = options.reduce_bf16 ? at::kBFloat16 : at::kFloat;
  return result;
}

fsdpp::comm::MeshOptions mesh_options(const Options& options) {
  return {.symmetric_buffers = options.symmetric_buffers, .copy_engine_gathers = options.copy_engine_gathers};
}

/// Unit by unit, so that the device never holds the whole model. With --deferred-init nothing is held yet.
void shard_model(MiniLLM& model, const Options& options, const Place& place) {
  auto how = shard_options(options);
  auto shard = [&](auto& module) {
    if (!options.deferred_init) module->to(place.device);
    return fsdpp::fully_shard(module, place.mesh, how);
  };
  shard(model->embed).set_unshard_in_backward(false);  // an embedding's backward does not read its table
  for (auto& block : model->blocks) shard(block);
  how.mp_policy = shard_options(for_head(options, place.world_size)).mp_policy;
  how.reshard_after_forward = false;  // its backward follows at once
  shard(model->head);
  auto root = fsdpp::fully_shard(model, place.mesh);
  if (place.world_size > 1) root.set_reduce_scatter_max_input_buffers(2);  // gradients are written in place while the ones before are reduced
}

MiniLLM make_model(const Options& options) {
  std::optional<fsdpp::DeferredInit> deferred;
  if (options.deferred_init) deferred.emplace();
  return MiniLLM(options.model);
}

bool can_hold_file(const std::string& path) {
  auto folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  return std::filesystem::is_directory(folder) && ::access(folder.c_str(), W_OK) == 0;
}

/// One number reduced over the ranks.
at::Tensor reduce(const Place& place, at::Tensor value, fsdpp::comm::ReduceOp op) {
  if (place.world_size == 1) return value;
  const fsdpp::comm::Buffer buffer{value.data_ptr(), value.numel(), value.scalar_type()};
  const auto stream = fsdpp::cuda::current_stream(place.device);
  place.mesh->reduce_comm().all_reduce(buffer, buffer, op, stream, {"minillm metrics", {}}).wait(stream);
  return value;
}

}  // namespace

Place find_place(const Options& options) {
  if (!options.shard) {
    const auto ranks = fsdpp::detect_rank_env().world_size;
    if (ranks != 1) throw fsdpp::ConfigError(text("--no-shard trains in one process, but the launcher started ", ranks));
    return {nullptr, options.cuda ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU), 0, 1};
  }
  fsdpp::comm::WorldOptions world_options;
  world_options.device = options.cuda ? c10::kCUDA : c10::kCPU;
  const auto world = fsdpp::comm::World::init(world_options);
  return {fsdpp::comm::Mesh::shard(world, "default", mesh_options(options)), world->device(), world->rank(), world->size()};
}

void check_outputs(const Options& options, const Place& place) {
  for (const auto& [flag, path] : {std::pair("--save-full", options.save_full), std::pair("--metrics", options.metrics)}) {
    const bool bad = place.rank == 0 && !path.empty() && !can_hold_file(path);
    const auto anywhere = reduce(place, at::full({1}, int64_t{bad}, at::TensorOptions().dtype(at::kLong).device(place.device)),
                                 fsdpp::comm::ReduceOp::Max);
    if (anywhere.item<int64_t>() != 0)
      throw fsdpp::ConfigError(text(flag, " ", path, ": rank 0 can't make a file there: its folder does not exist or is not writable"));
  }
}

MiniLLM build_model(const Options& options, const Place& place) {
  at::manual_seed(options.seed);
  auto model = make_model(options);
  if (place.mesh)
    shard_model(model, options, place);
  else if (!options.deferred_init)
    model->to(place.device);
  if (options.deferred_init) fsdpp::materialize(*model, {.seed = options.seed, .fill = options.init.empty(), .device = place.device});
  if (!options.init.empty()) fsdpp::dcp::load_full(*model, options.init);
  return model;
}

std::unique_ptr<BatchSource> make_batches(const Options& options, const Place& place) {
  const BatchShape shape{options.batch, options.seq, place.rank, place.world_size};
  if (options.synthetic) return synthetic_batches(options.seed, options.model.vocab, shape);
  return file_batches(options.data.empty() ? libtorch_headers() : options.data, options.model.vocab, shape,
                      options.shuffle ? &*options.shuffle : nullptr);
}

Trainer::Trainer(const Options& options, Place place)
    : options_(options),
      place_(std::move(place)),
      model_(build_model(options, place_)),
      optimizer_(*model_, {.lr = options.lr, .eps = options.adam_eps}),
      loader_(make_batches(options, place_), {options.batch, options.seq, place_.rank, place_.world_size},
              options.steps * options.grad_accum, place_.device),
      report_(report_options()),
      profile_(options, place_, [this] { return known_memory(); }) {
  if (options_.step_in_backward) optimizer_.step_in_backward(*model_);
  if (options_.graph) graph_.emplace(*model_, [this] { return train_step(); });
}

std::vector<fsdpp::profiler::MemoryEvent> Trainer::known_memory() const {
  using Category = fsdpp::profiler::MemoryEvent::Category;
  std::vector<at::Tensor> parameters, gradients, states;
  for (const auto& parameter : model_->parameters()) {
    const auto state = optimizer_.state(parameter);
    parameters.push_back(parameter);
    gradients.push_back(parameter.grad());
    states.insert(states.end(), {state.exp_avg, state.exp_avg_sq});
  }
  auto all = fsdpp::profiler::memory_of(Category::Parameters, parameters);
  for (const auto& more :
       {fsdpp::profiler::memory_of(Category::Gradients, gradients), fsdpp::profiler::memory_of(Category::Optimizer, states)})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

ReportOptions Trainer::report_options() const {
  return {.enabled = place_.rank == 0,
          .cuda = options_.cuda,
          .steps = options_.steps,
          .log_every = options_.log_every,
          .world_size = place_.world_size,
          .flops_per_token = flops_per_token(options_.model, options_.seq),
          .peak_flops = peak_flops(place_.device),
          .metrics = options_.metrics};
}

at::Tensor Trainer::forward(const Batch& batch) {
  const Autocast autocast(place_.device.type(), !place_.mesh && options_.precision == Precision::BF16);
  return mean_loss(model_, batch.inputs, batch.targets);
}

void Trainer::load_batches() {
  const bool first = batches_.empty();
  if (first) batches_.resize(static_cast<size_t>(options_.grad_accum));
  for (auto& batch : batches_) {
    auto next = loader_.next();
    if (first || !options_.graph) {
      batch = std::move(next);
    } else {
      batch.inputs.copy_(next.inputs);
      batch.targets.copy_(next.targets);
    }
  }
}

at::Tensor Trainer::accumulate_gradients() {
  const auto k = options_.grad_accum;
  auto sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(place_.device));
  for (int64_t micro = 0; micro < k; ++micro) {
    if (place_.mesh && k > 1) fsdpp::unit_of(*model_).set_requires_gradient_sync(micro + 1 == k);
    const auto loss = forward(batches_[static_cast<size_t>(micro)]);
    sum.add_(loss.detach());
    (k > 1 ? loss / k : loss).backward();
  }
  return sum;
}

void Trainer::clip_gradients() {
  if (options_.clip > 0)
    grad_norm_ = fsdpp::optim::clip_grad_norm_on_device_(*model_, options_.clip);
  else if (!options_.metrics.empty() && !options_.step_in_backward)
    grad_norm_ = fsdpp::optim::grad_norm_on_device(*model_);
}

at::Tensor Trainer::train_step() {
  optimizer_.zero_grad();
  auto loss_sum = accumulate_gradients();
  clip_gradients();
  optimizer_.step();
  return loss_sum;
}

double Trainer::mean_over_ranks(at::Tensor loss_sum) const {
  const auto total = reduce(place_, std::move(loss_sum), fsdpp::comm::ReduceOp::Sum).item<double>();
  return total / static_cast<double>(options_.grad_accum * place_.world_size);
}

int64_t Trainer::largest_over_ranks(int64_t value) const {
  const auto mine = at::full({1}, value, at::TensorOptions().dtype(at::kLong).device(place_.device));
  return reduce(place_, mine, fsdpp::comm::ReduceOp::Max).item<int64_t>();
}

void Trainer::run() {
  const auto tokens_per_step = static_cast<double>(options_.batch * options_.seq * options_.grad_accum * place_.world_size);
  report_.line(text("MiniLLM: ", parameter_count(options_.model), " parameters on ", place_.world_size,
                    place_.world_size == 1 ? " rank, " : " ranks, ", options_.cuda ? "CUDA, " : "CPU, ",
                    options_.precision == Precision::BF16 ? "bf16" : "fp32", place_.mesh ? "" : ", not sharded"));
  profile_.start();
  auto start = Clock::now();
  int64_t steps_since = 0;
  for (int64_t step = 0; step < options_.steps; ++step) {
    load_batches();
    auto loss_sum = graph_ ? (*graph_)() : train_step();
    profile_.step();
    ++steps_since;
    if (!report_.wants(step)) continue;
    synchronize(place_.device);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(steps_since);
    const auto norm = grad_norm_.defined() ? std::optional(grad_norm_.item<double>()) : std::nullopt;
    report_.step({step, mean_over_ranks(std::move(loss_sum)), norm, seconds, tokens_per_step,
                  largest_over_ranks(peak_bytes(place_.device) + fsdpp::registered_buffer_bytes(*model_))});
    steps_since = 0;
    start = Clock::now();
  }
  report_.summary();
  if (const auto said = profile_.finish(); !said.empty()) report_.line(said);
  if (!options_.save_full.empty()) fsdpp::dcp::save_full(*model_, options_.save_full);
}

}  // namespace minillm

#include "fsdpp/api/step_graph.h"

#include <optional>
#include <vector>

#include "base/enforce.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "fsdpp/cuda/graph.h"

namespace fsdpp {

namespace {

// Whatever the step left gathered ahead or reducing must have ended with it.
void join_streams(const std::vector<std::shared_ptr<engine::CommContext>>& contexts) {
  for (auto& context : contexts) {
    auto compute = context->compute_stream();
    for (auto stream : {context->gather_stream(), context->reduce_stream(), context->all_reduce_stream()}) compute.wait(stream);
  }
}

}  // namespace

struct StepGraph::Impl {
  const torch::nn::Module& model;
  std::function<at::Tensor()> step;
  int eager_steps;
  c10::Device device;
  std::vector<std::shared_ptr<engine::Unit>> units = {};  // of the capture
  std::vector<std::shared_ptr<engine::CommContext>> used = {};  // theirs
  at::Tensor output = {};
  std::optional<cuda::Graph> graph = {};  // goes before what it returned

  at::Tensor run_eager() {
    auto current = cuda::current_stream(device);
    cuda::StreamGuard guard(graph->stream());
    graph->stream().wait(current);
    at::Tensor result;
    try {
      result = step();
    } catch (...) {
      current.wait(graph->stream());
      throw;
    }
    current.wait(graph->stream());
    --eager_steps;
    return result;
  }

  // What code between the steps left: gathers that nobody used, gathered memory that a replay overwrites, parameters written.
  void settle_units() const {
    const auto current = cuda::current_stream(device);
    for (auto& unit : units) {
      if (unit->state() == engine::UnitState::Cached || unit->state() == engine::UnitState::Gathering) unit->reshard();
      unit->refresh_casts(current);
    }
    join_streams(used);
  }

  // Nothing of the step was done, whatever the host believes.
  void undo_capture() {
    output = at::Tensor();
    for (auto& context : used) context->reset_iteration();
    for (auto& unit : units) {
      unit->reshard();
      unit->note_shard_written();
    }
    for (auto& p : model.parameters()) p.mutable_grad() = at::Tensor();
  }

  void check_units() const {
    for (auto& unit : units)
      FSDPP_ENFORCE(!unit->offloads(), UsageError,
                    "StepGraph: expected units on the device, got unit '{}' with an offload policy. Try: without StepGraph", unit->name());
  }

  void capture() {
    units = engine::find_units(model);
    check_units();
    used = engine::contexts_of(units);
    try {
      graph->capture([&] {
        output = step();
        join_streams(used);
      });
    } catch (const std::exception& e) {
      undo_capture();
      fail<UsageError>("StepGraph: the training step can't be captured: {}. A captured step must not wait for the GPU or read from it. "
                       "Try: no item(), printing or clip_grad_norm_ (but clip_grad_norm_on_device_) in it, or train without StepGraph.",
                       e.what());
    }
  }
};

StepGraph::StepGraph(const torch::nn::Module& model, std::function<at::Tensor()> step, StepGraphOptions options) {
  FSDPP_ENFORCE(options.eager_steps >= 2, ConfigError, "StepGraph: expected eager_steps >= 2, got {}", options.eager_steps);
  const auto params = model.parameters();
  FSDPP_ENFORCE(!params.empty(), UsageError, "StepGraph: expected a model with parameters, got one without. Try: call the step itself");
  const auto units = engine::find_units(model);
  const auto device = units.empty() ? params.front().device() : units.front()->context().mesh().device();
  impl_.reset(new Impl{model, std::move(step), options.eager_steps, device});
  if (device.is_cuda()) impl_->graph.emplace(device);
}

StepGraph::~StepGraph() = default;

bool StepGraph::captured() const noexcept { return impl_->graph && impl_->graph->captured(); }

at::Tensor StepGraph::operator()() {
  if (!impl_->graph) return impl_->step();
  if (impl_->eager_steps > 0) return impl_->run_eager();
  if (captured()) impl_->settle_units();
  if (!captured()) impl_->capture();
  impl_->graph->replay();
  return impl_->output;
}

}  // namespace fsdpp

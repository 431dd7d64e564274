#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>

#include "fsdpp/base/export.h"

namespace fsdpp {

struct StepGraphOptions {
  /// Steps that run as usual first: they make optimizer state and buffers, and learn the order of units. At least 2.
  int eager_steps = 3;
};

/// A whole training step (gathers, forward, backward, reductions, clipping, optimizer) as one CUDA graph: captured once, then launched by
/// a single call, so that small models do not wait for the host.
///
///   StepGraph step(*model, [&] {
///     optimizer.zero_grad();
///     auto loss = loss_of(model(inputs), targets);   // inputs, targets: always the same tensors
///     loss.backward();
///     optimizer.step();
///     return loss.detach();
///   });
///   for (…) { inputs.copy_(batch.inputs); targets.copy_(batch.targets); auto loss = step(); }
///
/// Every call is one step of training, with the bits of a step without a graph. Learning rates may change between calls (fsdpp::optim's
/// optimizers; LibTorch's have their numbers baked in); shapes, tensors and control flow may not.
/// What can't be captured: waiting for the GPU or reading from it (item(), printing, clip_grad_norm_: use clip_grad_norm_on_device_),
/// offloaded parameters, gradients or optimizer state, retries by exception. Parameters may be written between calls (a checkpoint, an
/// average); with keep_cast_shard the optimizer must be one of fsdpp::optim. On the CPU every call runs the step as usual.
class FSDPP_API StepGraph {
 public:
  /// `model`: whose units take part (none: a plain model); must outlive this. Throws UsageError for a model without parameters.
  StepGraph(const torch::nn::Module& model, std::function<at::Tensor()> step, StepGraphOptions options = {});
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// One step: returns what `step` returned, once captured the same tensor each time, overwritten by the next call. Ordered on the current
  /// stream; does not wait for the GPU (the capturing call does). Collective. Throws UsageError when the step can't be captured: that step
  /// is not done, gradients are dropped, the next call tries again.
  at::Tensor operator()();
  [[nodiscard]] bool captured() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp

#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdpp/base/export.h"

namespace fsdpp {

/// How fsdpp::checkpoint runs a function again. Names and defaults as in torch.utils.checkpoint (use_reentrant=False).
struct CheckpointOptions {
  /// Run again with the random state of the first run, so that dropout draws the same masks: the default generators of the CPU,
  /// of the devices of the inputs and of the current CUDA device. false: a little cheaper, for functions that draw nothing.
  bool preserve_rng_state = true;
  /// Compare shape, dtype and device of what the two runs save, and refuse to go on where they differ.
  bool determinism_check = true;
  /// End the second run at the last tensor that backward needs. false: run the function to its end.
  bool early_stop = true;
};

namespace engine {

/// The scope of the first run of a function whose intermediate results are dropped and computed again in backward.
///
/// [Note: Recomputation] While the scope lives, autograd keeps a slot in place of each tensor it would save on this thread. The
/// first slot that backward opens runs the function again with gradients enabled and fills all slots that are still awaited;
/// the graph made by that run is thrown away, gradients flow through the first run's graph. So parameters' gradients, hooks and
/// the engine's count of expected gradients are those of a run without recomputation, and only one backward exists (the other
/// way, a node that runs a backward of its own inside backward, breaks these and needs an input that requires a gradient).
/// LibTorch asks its engine for the hooks of saved tensors, and only Python's engine has some; the first Recomputation
/// therefore puts in place of LibTorch's plain engine one that differs in nothing but this.
class FSDPP_API Recomputation {
 public:
  /// Runs the function again on these tensors, in the order of `inputs`; throws what it throws.
  using Function = std::function<void(const std::vector<at::Tensor>&)>;

  /// `inputs`: the tensors of the function's arguments, kept as autograd keeps tensors (in a nested scope they are dropped too;
  /// changing one in place before backward is an error there).
  /// Throws UsageError if the first Recomputation of the process is made inside backward, ConfigError if another engine than
  /// LibTorch's serves autograd (a Python interpreter in the process).
  Recomputation(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, Function again);
  ~Recomputation();
  Recomputation(const Recomputation&) = delete;
  Recomputation& operator=(const Recomputation&) = delete;

  /// True in the second run, on the thread that runs it: for functions with effects besides their result (running statistics).
  [[nodiscard]] static bool running() noexcept;
  /// Takes the tensor out of `tensor` and leaves an empty one of no meaning in it.
  [[nodiscard]] static at::Tensor take(at::Tensor& tensor);

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

}  // namespace engine
}  // namespace fsdpp

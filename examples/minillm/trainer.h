#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "data.h"
#include "fsdpp/api/step_graph.h"
#include "fsdpp/optim/adamw.h"
#include "model.h"
#include "options.h"
#include "place.h"
#include "profile.h"
#include "report.h"

namespace minillm {

/// Joins the launcher's ranks, or with --no-shard checks that there is one process. Collective.
[[nodiscard]] Place find_place(const Options& options);

/// Throws fsdpp::ConfigError on every rank if --save-full or --metrics names a place where rank 0 can't make a file: known now
/// rather than after the training. Collective.
void check_outputs(const Options& options, const Place& place);

/// The model with its initial weights (from --init, else from --seed, the same on every rank), on the device, sharded if the
/// place has a mesh. Collective.
[[nodiscard]] MiniLLM build_model(const Options& options, const Place& place);

/// The micro-batches that the flags ask for.
[[nodiscard]] std::unique_ptr<BatchSource> make_batches(const Options& options, const Place& place);

/// The training loop of one rank. Methods are collective.
class Trainer {
 public:
  Trainer(const Options& options, Place place);
  /// Trains all steps, reports, writes what --save-full asks for.
  void run();

 private:
  /// The next step's micro-batches, with --graph always in the same tensors.
  void load_batches();
  [[nodiscard]] at::Tensor forward(const Batch& batch);
  /// Gradients of all micro-batches of a step. Returns the sum of their losses, fp64 on the device.
  [[nodiscard]] at::Tensor accumulate_gradients();
  void clip_gradients();
  /// One optimizer step on the batches loaded, without waiting for the device. Returns the sum of the losses.
  [[nodiscard]] at::Tensor train_step();
  [[nodiscard]] double mean_over_ranks(at::Tensor loss_sum) const;
  [[nodiscard]] int64_t largest_over_ranks(int64_t value) const;
  [[nodiscard]] ReportOptions report_options() const;
  /// Parameters, gradients and optimizer state as they lie in memory now.
  [[nodiscard]] std::vector<fsdpp::profiler::MemoryEvent> known_memory() const;

  const Options& options_;
  Place place_;
  MiniLLM model_;
  fsdpp::optim::AdamW optimizer_;
  Loader loader_;
  std::vector<Batch> batches_;
  at::Tensor grad_norm_;  // of the last step, fp64 on the device; undefined if nobody wants it
  std::optional<fsdpp::StepGraph> graph_;
  Report report_;
  Profile profile_;
};

}  // namespace minillm

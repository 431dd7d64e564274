#pragma once
#include <memory>
#include <optional>

#include "data.h"
#include "fsdpp/comm/mesh.h"
#include "fsdpp/optim/adamw.h"
#include "model.h"
#include "options.h"
#include "report.h"

namespace minillm {

/// Where a process trains: alone, or as one rank of a mesh.
struct Place {
  std::shared_ptr<fsdpp::comm::Mesh> mesh;  ///< null: unsharded, in one process
  c10::Device device = c10::kCPU;
  int rank = 0;
  int world_size = 1;
};

/// Joins the launcher's ranks, or with --no-shard checks that there is one process. Collective.
[[nodiscard]] Place find_place(const Options& options);

/// On rank 0 throws fsdpp::ConfigError if --save-full names a place where no file can be made: known now rather than after
/// the training.
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
  [[nodiscard]] at::Tensor forward(const Batch& batch);
  /// Gradients of all micro-batches of a step. Returns the sum of their losses, fp64 on the device.
  [[nodiscard]] at::Tensor accumulate_gradients();
  [[nodiscard]] std::optional<double> clip_gradients();
  [[nodiscard]] double mean_over_ranks(at::Tensor loss_sum) const;
  [[nodiscard]] int64_t largest_over_ranks(int64_t value) const;
  [[nodiscard]] ReportOptions report_options() const;

  const Options& options_;
  Place place_;
  MiniLLM model_;
  fsdpp::optim::AdamW optimizer_;
  Loader loader_;
  Report report_;
};

}  // namespace minillm

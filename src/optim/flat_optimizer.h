#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/enforce.h"
#include "engine/unit.h"
#include "kernels/kernels.h"
#include "optim/flat_range.h"
#include "optim/model_params.h"
#include "optim/state_stage.h"

/// What the optimizers of this library share: parameters, checks, state, launches. See fsdpp/optim/optimizer.h.
namespace fsdpp::cuda {
class Graph;
}

namespace fsdpp::optim {

inline constexpr size_t kMaxStates = 3;

/// One parameter of an optimizer.
struct Entry {
  std::string name;
  at::Tensor handle;
  size_t group = 0;
  bool sharded = false;
  std::vector<int64_t> sizes = {};  ///< of the local shard, if sharded
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool allocated = false;
  std::array<at::Tensor, kMaxStates> state = {};  ///< laid out like the handle, as many as the optimizer keeps
  int64_t step = 0;                               ///< updates so far
};

/// A run of neighbouring parameters of one group, to be updated in one launch.
struct Run {
  kernels::DType param_dtype, grad_dtype;
  void* param;
  const void* grad;
  std::array<void*, kMaxStates> state;  ///< null: not kept
  int64_t numel;
  int64_t phase;
  size_t group;
  double grad_scale;
  void* cast = nullptr;  ///< the same values as param in cast_dtype, to be written too; null: none
  kernels::DType cast_dtype = kernels::DType::BF16;
  const void* numbers = nullptr;  ///< device memory with what write_numbers() wrote; null: to be worked out from the rest
};

class FlatOptimizer : public engine::BackwardStepper, public std::enable_shared_from_this<FlatOptimizer> {
 public:
  FlatOptimizer(const FlatOptimizer&) = delete;
  FlatOptimizer& operator=(const FlatOptimizer&) = delete;

  /// Its owner is gone: it steps no more in backward. Graphs that captured it keep its state.
  void retire() noexcept { active_ = false; }
  [[nodiscard]] bool active() const noexcept override { return active_; }
  void step(double grad_scale);
  /// An update of these parameters only, those of other optimizers left out. Their gradients are dropped.
  void step_some(const std::vector<at::Tensor>& parameters) override;
  void zero_grad(bool set_to_none);
  /// Throws UsageError if the parameter is not this optimizer's. Waits for offloaded state.
  [[nodiscard]] const Entry& entry_of(const at::Tensor& parameter) const;
  [[nodiscard]] const std::deque<Entry>& entries() const noexcept { return entries_; }
  [[nodiscard]] int64_t state_bytes() const noexcept { return state_bytes_; }
  [[nodiscard]] virtual size_t group_count() const noexcept = 0;
  [[nodiscard]] virtual double& lr(size_t group) = 0;

 protected:
  explicit FlatOptimizer(const char* who) : who_(who) {}

  /// Adds parameters to a group; UsageError, before anything is changed, if one is in a group already.
  void add(const ModelParams& params, size_t group);

  /// How many state tensors a parameter of the group has, and whether they are in host memory.
  [[nodiscard]] virtual size_t state_count(size_t group) const = 0;
  [[nodiscard]] virtual bool offloads_state(size_t group) const = 0;
  /// Whether update() writes Run::cast.
  [[nodiscard]] virtual bool writes_cast() const noexcept { return false; }
  /// What else the update depends on: parameters of different phase are never updated in one launch.
  [[nodiscard]] virtual int64_t phase(const Entry& entry) const = 0;
  virtual void update(const Run& run, cuda::StreamView stream) = 0;
  /// The numbers of a launch as its kernel reads them from memory: at most CapturedNumbers::kSlotBytes.
  virtual void write_numbers(const Run& run, void* out) const = 0;

 private:
  struct Update {
    Entry* entry;
    at::Tensor grad;  // strides and device of the handle
    std::shared_ptr<engine::Unit> unit = nullptr;  // that keeps a cast shard, if any
    at::Tensor cast = {};                          // the handle's part of it
  };
  [[nodiscard]] std::vector<Update> checked_updates(const std::vector<Entry*>& entries);
  void apply(std::vector<Update> updates, double grad_scale);
  void find_cast_shards(std::vector<Update>& updates) const;
  void note_updated(const std::vector<Update>& updates);
  struct Captured;
  [[nodiscard]] Captured& captured_in(cuda::Graph& graph, c10::Device device);
  /// The graph that these updates are captured in, if one is; the device is theirs.
  [[nodiscard]] static cuda::Graph* capturing(const std::vector<Update>& updates, c10::Device& device);
  void check_capturable(const std::vector<Update>& updates, c10::Device device) const;
  void before_replay(Captured& captured);
  void check_handle(const Entry& entry) const;
  void find_shardings();
  void allocate_missing(const std::vector<Update>& updates);
  void allocate(const std::vector<Entry*>& entries);
  [[nodiscard]] FlatRange range_of(const Update& update) const;
  void launch(const FlatRange& range, double grad_scale, Captured* captured, Entry& first);
  [[nodiscard]] StateStage& stage_on(c10::Device device);

  const char* who_;
  std::deque<Entry> entries_;                                   // addresses stay
  std::unordered_map<const c10::TensorImpl*, Entry*> by_handle_;
  int64_t state_bytes_ = 0;
  std::vector<std::unique_ptr<StateStage>> stages_;  // by device; goes before the state that it copies
  [[nodiscard]] const at::Tensor* numbers_on(c10::Device device) const;
  std::vector<at::Tensor> numbers_;                  // by device: for captured launches
  bool active_ = true;
  std::weak_ptr<Captured> captured_;                 // of the running capture; its graph keeps it
};

/// A FlatOptimizer whose groups have `Options`.
template <class Options>
class GroupedOptimizer : public FlatOptimizer {
 public:
  void add_group(const ModelParams& params, const Options& options) {
    check(options);
    add(params, groups_.size());
    groups_.push_back(options);
  }
  [[nodiscard]] const Options& options(size_t group) const {
    FSDPP_ENFORCE(group < groups_.size(), UsageError, "expected one of {} groups, got group {}", groups_.size(), group);
    return groups_[group];
  }
  [[nodiscard]] size_t group_count() const noexcept final { return groups_.size(); }
  [[nodiscard]] double& lr(size_t group) final { return const_cast<Options&>(options(group)).lr; }

 protected:
  using FlatOptimizer::FlatOptimizer;
  /// Throws ConfigError.
  virtual void check(const Options& options) const = 0;
  [[nodiscard]] bool offloads_state(size_t group) const final { return groups_[group].offload_state; }

 private:
  std::vector<Options> groups_;
};

}  // namespace fsdpp::optim

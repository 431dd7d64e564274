#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/comm_context.h"
#include "engine/flat_buffer.h"
#include "fsdpp/comm/mesh.h"
#include "fsdpp/engine/gradient_target.h"
#include "fsdpp/engine/policy.h"
#include "fsdpp/engine/unit_stats.h"
#include "fsdpp/shard/sharded_param.h"

namespace torch::nn {
class Module;
}

namespace fsdpp::engine {

/// [Note: Unit states] What a unit's handles show and what memory is valid:
///   Sharded    handles: local shards;      gathered memory: none
///   Gathering  handles: local shards;      gathered memory: being filled on the gather stream
///   Cached     handles: local shards;      gathered memory: valid as of the handles' versions (between forward and backward
///                                          without resharding)
///   Shown      handles: gathered views;    gathered memory: valid on the compute stream (inside forward and backward)
enum class UnitState { Sharded, Gathering, Cached, Shown };
enum class GatherReason { Forward, Backward, Explicit };

/// An optimizer that updates parameters inside backward.
class BackwardStepper {
 public:
  virtual ~BackwardStepper() = default;
  /// False once its owner is gone: a captured graph may outlive that.
  [[nodiscard]] virtual bool active() const noexcept = 0;
  /// These have new gradients, of one unit's reduction, and show their local shards; the current stream is the reduction's, gradients
  /// are off. Gradients that are dropped here are freed.
  virtual void step_some(const std::vector<at::Tensor>& parameters) = 0;
};

/// What one fully_shard call manages: the parameters of one or more modules, gathered and reduced together.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  struct Param {
    at::Tensor handle;
    std::string name;
    bool keeps_dtype = false;  ///< gathered in its own dtype whatever the policy's param_dtype
  };
  /// Shards the parameters (see FlatBuffer). Call attach() once the unit is owned by a shared_ptr.
  Unit(std::vector<std::weak_ptr<torch::nn::Module>> modules, const std::vector<Param>& params,
       std::shared_ptr<comm::Mesh> mesh, const FullyShardOptions& options);
  ~Unit();
  void attach();

  // -- deferred initialisation -----------------------------------------------------------------------------------------
  [[nodiscard]] bool deferred() const;
  /// Throws UsageError, naming the parameters, while they are on the meta device.
  void check_materialized() const;
  /// Gives the shards memory, lets `fill` write each parameter's part (contiguous, on the device, no guard) and shows it all: nothing
  /// has changed if `fill` throws.
  using Filler = std::function<void(const ParamState& param, shard::Range range, const at::Tensor& local)>;
  void materialize(const Filler& fill);

  // -- identity --------------------------------------------------------------------------------------------------------
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const { return modules_.front().lock(); }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> modules() const;
  [[nodiscard]] bool manages(const torch::nn::Module* module) const;
  [[nodiscard]] CommContext& context() const noexcept { return *context_; }
  [[nodiscard]] std::vector<std::unique_ptr<FlatBuffer>>& buffers() noexcept { return buffers_; }
  [[nodiscard]] const MixedPrecisionPolicy& policy() const noexcept { return options_.mp_policy; }
  [[nodiscard]] UnitState state() const noexcept { return state_; }
  /// One line for each parameter, equal on all ranks of a sane job.
  [[nodiscard]] std::string describe() const;
  /// Names parameters as seen from `root` and finds the units below it. Done once, by the first iteration's root.
  void initialise_root();
  void set_root_default(bool is_root);

  // -- forward ---------------------------------------------------------------------------------------------------------
  /// Gathers (if not done ahead), waits on the compute stream and shows the gathered parameters.
  void pre_forward();
  /// Hides them; gives the memory back unless it is kept for backward or for other modules of the unit. `module`: the one that ran.
  /// `will_backward`: an output wants a gradient.
  void post_forward(const torch::nn::Module* module, bool will_backward);
  /// The root's forward ended: modules of the unit that did not run in it won't.
  void end_open_group();
  /// Issues the gather if the memory is not valid. No wait.
  void gather(GatherReason reason);
  void gather_in_backward();
  /// Completes a gather() and shows the gathered parameters.
  void show();
  void hide();
  /// Gives the gathered memory back.
  void reshard();
  /// Forward threw: this unit and those it borrows from are sharded again.
  void abandon_forward();
  /// This unit owns `other`, which has no parameters to own it.
  void keep_alive(std::shared_ptr<Unit> other) { kept_alive_.push_back(std::move(other)); }
  /// Parameters tied to another unit's: that unit is gathered along with this one, and stays so until this one's forward ends.
  void borrow(std::weak_ptr<Unit> owner) { borrowed_.push_back(std::move(owner)); }

  /// No module that ran in this forward wants a backward, so in backward the one that runs now is the last of the unit.
  [[nodiscard]] bool runs_first_for_backward() const noexcept { return !group_wants_backward_; }
  /// Whether this unit's last forward ended before the one of `later` began: in backward it comes when `later` is done.
  [[nodiscard]] bool ended_before(const Unit& later) const noexcept { return ended_at_ < later.began_at_; }

  // -- backward --------------------------------------------------------------------------------------------------------
  /// A graph holds an output of this unit, or has let go of it. When the last one goes, nobody will come back for memory that
  /// was kept for backward, and it is given back.
  void expect_backward() noexcept { ++awaited_outputs_; }
  void forget_backward() noexcept;
  /// `last_module`: the gradient of a module's output arrived for which runs_first_for_backward() was true.
  void pre_backward(bool last_module = false);
  /// An operator of backward needs a parameter: gathers the unit whatever set_unshard_in_backward says.
  void gather_on_demand();
  void before_accumulate(FlatBuffer& buffer, size_t param);
  /// See fsdpp::gradient_target.
  [[nodiscard]] std::optional<GradientTarget> gradient_target(FlatBuffer& buffer, size_t param, const at::Tensor& early);
  /// See fsdpp::early_gradient.
  [[nodiscard]] std::optional<at::Tensor> early_gradient(FlatBuffer& buffer);
  void after_accumulate(FlatBuffer& buffer, size_t param);
  /// Called once at the end of each backward that touched the unit.
  void finish_backward();
  /// The last part of it, also for units that a backward did not touch: they are hidden, and resharded unless that is off.
  void end_backward();
  /// Parameters or gradients live in host memory between their uses.
  [[nodiscard]] bool offloads() const { return reads_host_memory() || writes_host_memory(); }
  [[nodiscard]] bool awaits_backward() const noexcept { return awaited_outputs_ > 0; }
  /// Whether gradients kept without synchronisation wait here for a backward that has it.
  [[nodiscard]] bool owes_reduction() const;
  /// Called at the end of a backward if owes_reduction(), in one order on all ranks.
  void reduce_late();
  /// The engine's hook on a parameter was replaced: the next forward is an error.
  void note_lost_hook(const std::string& param) noexcept;
  /// For each parameter one byte: whether this backward's reduction held a gradient of this rank. True if the unit was reduced and
  /// one of them is missing.
  [[nodiscard]] bool append_gradient_flags(std::vector<char>& flags) const;
  /// The same bytes, as the maximum over the ranks: where only others had a gradient, it is this rank's too.
  /// True if there was one.
  bool adopt_gradient_flags(const char* flags);
  [[nodiscard]] size_t param_count() const;
  /// Hands the sharded gradients to the handles.
  void restore_grads();
  /// After a backward that ended by an exception: drops its gradients, shards the unit.
  void abandon_backward();
  [[nodiscard]] bool in_backward() const noexcept { return backward_task_ >= 0; }
  [[nodiscard]] int64_t post_forward_index() const noexcept { return post_forward_index_; }

  // -- use guard -------------------------------------------------------------------------------------------------------
  [[nodiscard]] bool serves_operators(const at::Tensor& tensor) const;
  /// Brings kept cast shards up to date on `stream`, as the next gather would.
  void refresh_casts(cuda::StreamView stream);
  /// The local shards changed, perhaps without a new version of the handles.
  void note_shard_written() noexcept { shard_written_ = true; }
  [[nodiscard]] bool is_shard_of(const at::Tensor& tensor) const;
  [[nodiscard]] std::string name_of(const at::Tensor& tensor) const;
  /// A parameter's part of the kept cast shard (shaped like the local shard), for who writes both; undefined if none is kept.
  [[nodiscard]] at::Tensor cast_view(const at::Tensor& parameter) const;
  /// That part is up to date with the parameter's handle, version included.
  void note_cast_written(const at::Tensor& parameter) noexcept;
  /// The local shard of a parameter, whatever its handle shows. REQUIRES: it is this unit's.
  [[nodiscard]] at::Tensor local_shard(const at::Tensor& parameter) const;

  // -- switches and readings -------------------------------------------------------------------------------------------
  void set_requires_gradient_sync(bool value) noexcept { requires_gradient_sync_ = value; }
  void set_reshard_after_forward(ReshardAfterForward value);
  void set_requires_all_reduce(bool value) noexcept { requires_all_reduce_ = value; }
  void set_unshard_in_backward(bool value) noexcept { unshards_in_backward_ = value; }
  [[nodiscard]] bool unshards_in_backward() const noexcept { return unshards_in_backward_; }
  void set_reduce_unused_params(bool value);
  [[nodiscard]] bool reduces_unused() const noexcept { return reduces_unused_; }
  void set_gradient_divide_factor(double factor);
  /// Runs `hook` with the parameter's handle after each reduction that gave it a gradient.
  void add_param_hook(const at::Tensor& handle, std::function<void(const at::Tensor&)> hook);
  /// From now on, while it lives, this optimizer updates the unit inside backward.
  void step_by(std::weak_ptr<BackwardStepper> stepper);
  [[nodiscard]] bool steps_in_backward() const noexcept { return stepper() != nullptr; }
  void set_reduced_hook(FlatBuffer::ReducedHook hook) { reduced_hook_ = std::move(hook); }
  using UnitList = std::vector<std::weak_ptr<Unit>>;
  void set_forward_prefetch(UnitList units) { forward_prefetch_ = std::move(units); }
  void set_backward_prefetch(UnitList units) { backward_prefetch_ = std::move(units); }
  [[nodiscard]] const UnitList& forward_prefetch() const noexcept { return forward_prefetch_; }
  [[nodiscard]] const UnitList& backward_prefetch() const noexcept { return backward_prefetch_; }
  void set_reshard_after_backward(bool value) noexcept { reshard_after_backward_ = value; }
  [[nodiscard]] UnitStats& stats() noexcept { return stats_; }
  /// `as_root`: as if the unit's forward started iterations (known only once one did).
  [[nodiscard]] UnitMemory memory(bool as_root = false) const;
  [[nodiscard]] std::vector<shard::ShardedParam> sharded_params() const;
  [[nodiscard]] std::string plan(bool rows_by_rank) const;

 private:
  struct Place {
    FlatBuffer* buffer = nullptr;
    size_t index = 0;
  };
  /// Where a parameter is, by its handle; no buffer if the unit does not manage it.
  [[nodiscard]] Place find(const at::Tensor& handle) const noexcept;
  [[nodiscard]] bool cache_is_current() const;
  /// Labels a collective by the unit; the root, which has no name, by `of_root`.
  [[nodiscard]] comm::OpInfo wire_info(std::string_view of_root) const { return {.label = name_.empty() ? of_root : std::string_view(name_)}; }
  [[nodiscard]] bool reads_host_memory() const;   ///< gathers start from offloaded shards
  [[nodiscard]] bool writes_host_memory() const;  ///< reductions end in offloaded gradients
  void end_forward(bool will_backward);
  void lend();
  void take_back(bool will_backward);
  [[nodiscard]] int group_after_forward() const;
  void gather_buffers(cuda::StreamView stream, bool from_group);
  [[nodiscard]] bool has_group_pieces() const;
  void drop_group_pieces();
  void show_gathered();
  void end_group();
  void note_buffers();
  [[nodiscard]] bool begin_group();
  void leave_group(const torch::nn::Module* module, bool will_backward);
  void install_accumulators();
  void release_accumulators();
  void release_memory();
  void begin_backward(int task);
  [[nodiscard]] bool keeps_reduce_dtype() const noexcept;
  void choose_gradient_dtype();
  void post_backward();
  void reduce();
  void accumulate();
  void settle_reductions();
  [[nodiscard]] bool reduces_in_place(const FlatBuffer& buffer) const;
  [[nodiscard]] bool offers_targets(const FlatBuffer& buffer, bool in_place) const;
  [[nodiscard]] bool wants_reduction(const FlatBuffer& buffer, bool others_reduce) const;
  void run_param_hooks(cuda::StreamView stream);
  [[nodiscard]] std::shared_ptr<BackwardStepper> stepper() const noexcept {
    auto known = stepper_.lock();
    return known && known->active() ? known : nullptr;
  }
  /// The user may drop gradients inside backward, on the reduction's stream.
  [[nodiscard]] bool runs_hooks() const noexcept { return has_param_hooks_ || steps_in_backward(); }
  void check_hooks() const;
  void finish_reduce(const std::vector<FlatBuffer*>& reducing);
  [[nodiscard]] bool has_frozen_params() const;
  [[nodiscard]] bool may_be_read_on() const;

  std::string name_;
  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  std::shared_ptr<CommContext> context_;
  FullyShardOptions options_;
  std::vector<std::unique_ptr<FlatBuffer>> buffers_;
  std::vector<std::weak_ptr<Unit>> borrowed_;
  std::vector<std::shared_ptr<Unit>> kept_alive_;
  std::vector<const torch::nn::Module*> to_run_;  ///< of several modules, those that a forward has not ended
  bool group_wants_backward_ = false;
  std::string lost_hook_;            ///< a parameter whose engine hook the user replaced
  int64_t gathered_bytes_ = 0;
  UnitState state_ = UnitState::Sharded;
  comm::Ticket gather_ticket_;
  cuda::StreamView accumulator_stream_;
  bool root_default_ = false, root_initialised_ = false, under_root_ = false;
  bool requires_gradient_sync_ = true, requires_all_reduce_ = true, reshard_after_backward_ = true;
  bool unshards_in_backward_ = true, reduces_unused_ = false;
  FlatBuffer::ReducedHook reduced_hook_;
  std::weak_ptr<BackwardStepper> stepper_;
  bool has_param_hooks_ = false, hooks_run_ = false;
  bool targets_given_ = false;  ///< gradients were written to their targets and not yet reduced
  UnitList forward_prefetch_, backward_prefetch_;
  int backward_task_ = -1;       ///< autograd's graph task that is in this unit's backward
  int64_t expected_grads_ = 0, seen_grads_ = 0;
  bool reached_last_module_ = false;  ///< by this backward: pre_backward(true)
  std::atomic<int64_t> awaited_outputs_{0};  ///< outputs whose graphs are alive
  int64_t began_at_ = 0, ended_at_ = 0;  ///< last forward, in the context's ticks
  bool shard_written_ = false;       ///< since the last gather
  int lent_ = 0;                     ///< forwards of borrowers that run
  bool kept_after_backward_ = false; ///< gathered memory stays, since reshard_after_backward is off
  int64_t post_forward_index_ = -1;  ///< where CommContext::record_post_forward put it last
  UnitStats stats_;
};

}  // namespace fsdpp::engine

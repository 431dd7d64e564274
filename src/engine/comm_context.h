#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/slot_pool.h"
#include "engine/step_check.h"
#include "fsdpp/comm/mesh.h"
#include "fsdpp/cuda/stream.h"

namespace torch::nn {
class Module;
}

namespace fsdpp::engine {

class Unit;

/// What all units of one mesh share on this rank: streams, memory, and where the iteration stands.
///
/// Streams (CUDA): `gather_stream` runs casts and all-gathers, `reduce_stream` reduce-scatters and what follows them. With one
/// rank and nothing offloaded both are the caller's current stream: there is nothing to run beside computation.
/// [Note: Iteration] The unit whose forward begins while no other unit's forward runs, outside backward, is the root; its
/// pre-forward starts an iteration: what the optimizer wrote on the current stream becomes visible to the gather stream, and
/// the order in which units are used is compared with the last iteration's to prefetch by it.
class CommContext : public std::enable_shared_from_this<CommContext> {
 public:
  /// The context of a mesh, made at first use and shared while anybody holds it.
  [[nodiscard]] static std::shared_ptr<CommContext> of(const std::shared_ptr<comm::Mesh>& mesh);
  explicit CommContext(std::shared_ptr<comm::Mesh> mesh);
  CommContext(const CommContext&) = delete;
  CommContext& operator=(const CommContext&) = delete;

  [[nodiscard]] comm::Mesh& mesh() const noexcept { return *mesh_; }
  [[nodiscard]] const std::shared_ptr<comm::Mesh>& mesh_ptr() const noexcept { return mesh_; }
  /// Whether gathers, and whether reductions, involve other ranks.
  [[nodiscard]] bool on_wire() const noexcept { return mesh_->shard_size() > 1; }
  [[nodiscard]] bool reduces_on_wire() const noexcept { return on_wire() || mesh_->replicate_size() > 1; }
  [[nodiscard]] cuda::StreamView compute_stream() const { return cuda::current_stream(mesh_->device()); }
  [[nodiscard]] bool gathers_apart() const noexcept { return on_wire() || copies_to_host_; }
  [[nodiscard]] bool reduces_apart() const noexcept { return reduces_on_wire() || copies_to_host_; }
  [[nodiscard]] cuda::StreamView gather_stream() const { return gathers_apart() ? gather_stream_.view() : compute_stream(); }
  [[nodiscard]] cuda::StreamView reduce_stream() const { return reduces_apart() ? reduce_stream_.view() : compute_stream(); }
  [[nodiscard]] cuda::StreamView all_reduce_stream() const { return mesh_->replicate_size() > 1 ? all_reduce_stream_.view() : reduce_stream(); }
  [[nodiscard]] SlotPool& gathered_pool() noexcept { return gathered_pool_; }
  [[nodiscard]] SlotPool& gradient_pool() noexcept { return gradient_pool_; }
  /// Whether those two are operands of the communicators (MeshOptions::symmetric_buffers).
  [[nodiscard]] bool symmetric_buffers() const noexcept { return gathered_pool_.symmetric(); }
  /// Makes the slots that `units` need by the memory formula, on all ranks in one order. Collective; nothing without symmetric buffers.
  void reserve_slots(const std::vector<Unit*>& units);
  /// Passed through on the way from and to offloaded memory.
  [[nodiscard]] SlotPool& staging_pool() noexcept { return staging_pool_; }
  [[nodiscard]] StepCheck& step_check() noexcept { return step_check_; }
  /// Takes part in the exchange of each backward from now on. Same units in the same order on all ranks.
  void check_each_step(const std::shared_ptr<Unit>& unit);
  /// Gradient buffers of one size in use at once: with 1, the next is packed when the reduction before it is done.
  void set_reduce_buffers(int count);
  [[nodiscard]] int reduce_buffers() const noexcept { return reduce_buffers_; }
  /// Completes reductions until there is a buffer for another one.
  void make_room_for_reduce() { drain_reduces(static_cast<size_t>(reduce_buffers_) - 1); }

  // -- offload ---------------------------------------------------------------------------------------------------------
  /// A unit here keeps parameters or gradients in the host's memory.
  void copies_to_host();
  /// `stream` now holds copies from or to offloaded memory.
  void note_host_access(cuda::StreamView stream);
  /// Blocks the host until those copies are done: then the host may read and write that memory.
  void settle_host_access();

  // -- forward ---------------------------------------------------------------------------------------------------------
  /// Called at each unit's pre-forward: starts an iteration if the unit is a root.
  void enter_forward(Unit& unit);
  void leave_forward();
  /// A unit of several modules of which some have not run yet: ended with the root's forward at the latest.
  void end_group_later(const std::shared_ptr<Unit>& unit) { open_groups_.push_back(unit); }
  /// Notes that `unit` is used next and gathers ahead by last iteration's order.
  void record_forward_use(const std::shared_ptr<Unit>& unit);
  /// Counts begins and ends of forwards.
  [[nodiscard]] int64_t next_tick() noexcept { return ++ticks_; }
  /// Notes that `unit` ended a forward that wants a backward; returns its place in that order.
  int64_t record_post_forward(const std::shared_ptr<Unit>& unit);

  // -- backward --------------------------------------------------------------------------------------------------------
  /// Registers `unit` with the running backward (queues the final callback at the first one). REQUIRES: inside backward.
  void touch(const std::shared_ptr<Unit>& unit);
  /// Gathers ahead the unit used before `unit` in forward.
  void prefetch_backward(const Unit& unit);
  /// Remembers a unit that may have to reduce at the end of a backward that does not reach it (Unit::owes_reduction).
  void note_late_reducer(const std::shared_ptr<Unit>& unit);
  /// A reduction was issued; `finish` moves the result to its place once it is complete.
  void push_reduce(comm::Ticket ticket, std::function<void()> finish);
  /// Completes reductions until at most `in_flight` remain (CPU: blocks for each; CUDA: they complete in stream order).
  void drain_reduces(size_t in_flight);
  /// Lets the compute stream wait for all reductions.
  void wait_reduces();
  /// Gives back the memory of `unit`, which may still be read, once backward has passed its forward's begin.
  void reshard_later(const std::shared_ptr<Unit>& unit) { reshard_later_.push_back(unit); }
  /// Backward reaches `unit`: those that may be resharded now.
  void reshard_finished(const Unit& unit);
  [[nodiscard]] bool is_last_backward() const noexcept { return is_last_backward_; }
  void set_is_last_backward(bool value) noexcept { is_last_backward_ = value; }
  /// The next iteration's gathers wait for `event` in place of the current stream. One-shot.
  void set_post_optim_event(cuda::Event event);
  /// Abandons what a forward or backward that ended by an exception left behind.
  void reset_iteration() noexcept;
  /// The number of models compared across ranks so far on this mesh.
  [[nodiscard]] int next_model_check() noexcept { return model_checks_++; }

 private:
  [[nodiscard]] cuda::Stream make_stream() const;
  void begin_iteration();
  void gather_ahead(const std::shared_ptr<Unit>& unit, bool forward);
  void drop_unused_gathers();
  void join_late(std::vector<std::shared_ptr<Unit>>& units);
  void complete(std::vector<std::shared_ptr<Unit>>& units);
  void agree_on_step();
  void reshard_rest();
  void finish_backward(int task);

  struct BackwardEnd;
  struct PendingReduce {
    comm::Ticket ticket;
    std::function<void()> finish;
  };

  std::shared_ptr<comm::Mesh> mesh_;
  std::optional<cuda::Event> post_optim_event_;
  cuda::Stream gather_stream_, reduce_stream_, all_reduce_stream_;
  bool copies_to_host_ = false;
  bool adopted_ = false;  ///< the last backward took over gradients of other ranks
  std::vector<std::pair<cuda::StreamView, cuda::Event>> host_accesses_;  ///< the last one of each stream
  SlotPool gathered_pool_, gradient_pool_, staging_pool_;
  StepCheck step_check_;
  std::vector<std::pair<std::weak_ptr<Unit>, size_t>> checked_units_;  ///< with their numbers of parameters
  int reduce_buffers_ = 1;
  bool slots_reserved_ = false;  ///< by reserve_slots
  int64_t iterations_ = 0, ticks_ = 0;
  int forward_depth_ = 0, model_checks_ = 0;
  bool is_last_backward_ = true;
  std::vector<std::weak_ptr<Unit>> forward_order_, last_forward_order_, post_forward_order_;
  std::map<int, std::vector<std::shared_ptr<Unit>>> running_backwards_;  ///< by autograd's graph task
  std::vector<std::weak_ptr<Unit>> gathered_ahead_, reshard_later_, late_reducers_, open_groups_;
  std::vector<PendingReduce> reduces_;
};

/// Gives every rank of the mesh the values of `tensors` on its rank 0. Collective over the mesh.
void broadcast_from_rank0(comm::Mesh& mesh, const std::vector<at::Tensor>& tensors);

/// Gives every rank of the mesh the largest values of any. `numbers`: int64, contiguous, on the mesh's device. Collective.
void keep_largest(comm::Mesh& mesh, const at::Tensor& numbers);

/// Compares the description of the model's units across ranks. Collective over the mesh. Throws UsageError on every rank,
/// naming the first difference, when they are not equal.
void check_same_model(CommContext& context, const std::string& description);

}  // namespace fsdpp::engine

#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/slot_pool.h"
#include "fsdpp/comm/communicator.h"
#include "fsdpp/engine/gradient_target.h"
#include "fsdpp/shard/plan.h"
#include "kernels/kernels.h"

namespace torch::autograd {
struct Node;
}

namespace fsdpp::engine {

using Handle = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakHandle = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

[[nodiscard]] inline char* at_element(void* base, int64_t element, c10::ScalarType dtype) {
  return static_cast<char*>(base) + element * static_cast<int64_t>(c10::elementSize(dtype));
}

/// One parameter of a unit. The handle (the user's tensor) is held weakly: parameters own their unit, see autograd_edges.h.
struct ParamState {
  std::string name;                  ///< fully qualified below the root once that is known
  WeakHandle weak_handle{Handle()};
  std::vector<int64_t> sizes;        ///< global shape
  size_t plan_index = 0;
  at::Tensor shard_view;             ///< local shard, view of the shard buffer, original dtype
  at::Tensor gathered_view;          ///< global shape, view of the gathered buffer
  std::weak_ptr<torch::autograd::Node> accumulator;    ///< AccumulateGrad of the gathered parameter; alive while a graph wants its gradient
  std::shared_ptr<torch::autograd::Node> held_accumulator;  ///< the same, kept while a forward may yet use it
  at::Tensor unsharded_grad;         ///< gradient of this backward, global shape; undefined when there is none
  at::Tensor sharded_grad;           ///< what .grad becomes when the backward ends, local shape; undefined: no gradient
  bool grad_put_aside = false;       ///< .grad was moved to sharded_grad for the running backward
  bool reduced = false;              ///< this backward's reduction held a gradient of this rank
  std::vector<std::function<void(const at::Tensor&)>> hooks;  ///< of the user, after a reduction
  uint32_t version = 0;              ///< of the handle when it was gathered last
  uint32_t cast_version = 0;         ///< of the handle when the kept cast shard got its values
  at::Tensor on_meta;                ///< the whole parameter as it was built, while the shard has no memory

  [[nodiscard]] at::Tensor handle() const;  ///< undefined if the user dropped it
  /// Moves .grad of the handle to sharded_grad, once in a backward.
  void put_grad_aside(const at::Tensor& live_handle);
};

/// The parameters of a unit that share dtype and requires_grad: shard buffer, gathered buffer, gradient buffer.
///
/// `gathered` is one StorageImpl for life (autograd's saved views keep it); unshard gives it memory, reshard takes it away.
/// With one rank and equal dtypes the gathered buffer is the shard buffer itself (aliased()): nothing is copied or freed. With one
/// rank and a kept cast shard it is that one.
class FlatBuffer {
 public:
  struct Config {
    c10::Device device = c10::kCPU;
    int world_size = 1, rank = 0;  ///< of the shard axis
    int replicate_size = 1;
    std::optional<c10::ScalarType> param_dtype, policy_reduce_dtype;  ///< of the policy, where it applies
    c10::ScalarType dtype, gathered_dtype, reduce_dtype;
    /// The dtypes that follow from the parameters' own. Throws ConfigError for one that can't be gathered or reduced.
    void set_dtype(c10::ScalarType original);
    bool offload_params = false, offload_gradients = false, pin_memory = true;  ///< see CPUOffloadPolicy
    bool keep_cast = false;  ///< see FullyShardOptions::keep_cast_shard
  };
  /// Takes this rank's part of each parameter and points the handles at it; the full originals are freed with their storage.
  FlatBuffer(const Config& config, std::vector<at::Tensor> handles, std::vector<std::string> names);
  ~FlatBuffer();
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;

  [[nodiscard]] const Config& config() const noexcept { return config_; }
  [[nodiscard]] const shard::Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::vector<ParamState>& params() noexcept { return params_; }
  [[nodiscard]] const std::vector<ParamState>& params() const noexcept { return params_; }
  [[nodiscard]] bool aliased() const noexcept { return aliased_; }
  [[nodiscard]] const at::Tensor& shard() const noexcept { return shard_; }
  [[nodiscard]] const void* shard_storage() const noexcept { return shard_.storage().unsafeGetStorageImpl(); }
  [[nodiscard]] const void* gathered_storage() const noexcept { return gathered_.get(); }
  [[nodiscard]] int64_t gathered_bytes() const noexcept;
  [[nodiscard]] int64_t shard_bytes() const noexcept;
  [[nodiscard]] int64_t cast_bytes() const noexcept;
  /// Device memory that a gather of an offloaded shard needs besides the gathered buffer, for its time on the stream.
  [[nodiscard]] int64_t staging_bytes() const noexcept { return config_.offload_params && casts() ? shard_bytes() : 0; }
  [[nodiscard]] int64_t gradient_bytes() const noexcept;

  // -- deferred initialisation (parameters built on the meta device) ---------------------------------------------------
  [[nodiscard]] bool deferred() const noexcept { return shard_.is_meta(); }
  /// Memory for the shard, zeroed.
  [[nodiscard]] at::Tensor make_shard() const {
    return make_slice(config_.dtype, config_.offload_params, /*zeroed=*/true);
  }
  /// A parameter's part of `flat`, a tensor like shard().
  [[nodiscard]] at::Tensor local_view(const at::Tensor& flat, const ParamState& param) const;
  /// Puts `shard`, from make_shard(), in the place of the one without memory, and points the handles at it.
  void take_shard(at::Tensor shard);

  // -- gather ----------------------------------------------------------------------------------------------------------
  /// Takes memory for the gathered buffer (on `stream`) and fills it: with one rank by a cast on `stream`; else writes the own
  /// slice, if a cast is needed, and issues the all-gather on `stream`.
  comm::Ticket gather(SlotPool& pool, SlotPool& staging_pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info);
  /// Takes memory for the gathered buffer, on `stream`, if there is none yet and gather() would.
  void take_gathered(SlotPool& pool, cuda::StreamView stream);
  /// Fills the kept cast shard on `stream` if it is not current; nothing if none is kept.
  void refresh_cast(cuda::StreamView stream);
  /// The kept cast shard is stale, whatever the handles' versions say.
  void note_written() noexcept { cast_valid_ = false; }
  /// A parameter's part of the kept cast shard, for who writes the parameter; undefined if none is kept.
  [[nodiscard]] at::Tensor cast_view(size_t param) const;
  /// That part has the values of the parameter's handle as it is now.
  void note_cast_written(size_t param) noexcept;
  /// Takes the gathered memory away again. `last_user`: the stream that may still read it.
  void free_gathered(SlotPool& pool, cuda::StreamView last_user);
  /// Whether the user gave the handle other memory. REQUIRES: it does not show the gathered parameter.
  [[nodiscard]] bool is_replaced(const at::Tensor& handle) const noexcept {
    return handle.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() != shard_storage();
  }
  /// Copies a handle's data back into the shard, on the current stream, where the user replaced it (module->to(), set_data); true
  /// if it did. If all of them have another floating dtype now, the buffer has it from here on. REQUIRES: no gathered memory. Throws
  /// UsageError when shape, device or only some dtypes no longer fit.
  bool adopt_replaced_handles();

  // -- reduce ----------------------------------------------------------------------------------------------------------
  [[nodiscard]] bool has_unsharded_grads() const noexcept;
  /// Whether a parameter here wants a gradient now.
  [[nodiscard]] bool trains() const noexcept;
  [[nodiscard]] bool has_accumulated() const noexcept { return grad_slot_ != nullptr || partial_.defined(); }
  [[nodiscard]] bool has_gradient_buffer() const noexcept { return grad_slot_ != nullptr; }
  /// Whether this buffer can hand out targets now; `in_place`: into the sharded gradients.
  [[nodiscard]] bool takes_targets(bool in_place) const noexcept;
  /// The place of one parameter's gradient in the gradient buffer, or in the sharded gradients; counted as given. `stream` is the one
  /// that writes it.
  /// `early`, if it is what early_gradient() gave last, becomes that place where there is none yet.
  [[nodiscard]] GradientTarget target(size_t param, bool in_place, SlotPool& pool, cuda::StreamView stream, const at::Tensor& early);
  /// Memory for the gradient of the only parameter, ahead of target(): a slot, or with `in_place` sharded gradients. Written on `stream`.
  /// Nothing while earlier memory of the kind is out, or where there is a gradient.
  [[nodiscard]] std::optional<at::Tensor> early_gradient(bool in_place, std::shared_ptr<SlotPool> pool, cuda::StreamView stream);
  /// Unsharded gradients, or targets between which padding and missing gradients are not zero yet.
  [[nodiscard]] bool needs_packing() const noexcept { return has_unsharded_grads() || unpacked_; }
  /// Adds the unsharded gradients to the gradient buffer (reduce dtype, padding zero) on `stream`, and drops them.
  void accumulate(SlotPool& pool, cuda::StreamView stream);
  /// A reduction of the gradient buffer was issued and not yet finished: the buffer must not be touched.
  [[nodiscard]] bool is_reducing() const noexcept { return reducing_; }
  /// Issues the reduce-scatter of the gradient buffer on `stream`, in place.
  comm::Ticket reduce_scatter(comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info);
  /// Issues the all-reduce of the reduced slice among the replicas on `stream`, in place. What keep_partial kept is added first.
  comm::Ticket all_reduce(comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info);
  /// Adds the reduced slice to what waits for a later all-reduce, on `stream`, and releases the gradient buffer.
  void keep_partial(SlotPool& pool, cuda::StreamView stream);
  /// Called with the reduced slice (1-D [slice], reduce dtype, scaled to the mean), current stream `stream`.
  using ReducedHook = std::function<void(const at::Tensor&)>;
  /// Moves the reduced slice, scaled to the mean, into the sharded gradients (adding to those put aside) on `stream` and
  /// releases the gradient buffer. The tickets must have been waited for.
  void finish_reduce(SlotPool& pool, SlotPool& staging_pool, cuda::StreamView stream, const ReducedHook& hook = nullptr);
  /// Another rank had a gradient for parameter `param` where this one had none: its part of the reduced slice counts.
  /// REQUIRES: this buffer was reduced in this backward.
  void adopt_gradient(size_t param);
  /// The reductions of this backward are over.
  void end_backward();
  /// Sharded gradients that are made from here on have the reduce dtype, where that is narrower than the original one
  /// and no bit is lost by it that the reduction kept (one rank, scale 1); false: the original dtype again. Added to
  /// gradients that are there they have those' dtype, the original one.
  void keep_reduce_dtype(bool keep) noexcept;
  [[nodiscard]] int64_t sharded_gradient_bytes(bool reduce_dtype) const noexcept;
  /// The sharded gradients may be freed before backward ends: on the reduction's stream, whose memory they are from here on.
  void expect_early_free() noexcept { freed_in_backward_ = true; }
  /// Divides gradients by `factor` in place of the number of ranks.
  void set_divide_factor(double factor);
  /// Trainable parameters without a gradient of their own get zeros from here on (they are reduced like the others).
  void use_zeros_for_missing() noexcept;

  // -- resharding to a smaller group -----------------------------------------------------------------------------------
  /// Keeps this rank's 1/`group` of the gathered buffer (piece rank mod group) in a slot of its own, on `stream`.
  void keep_group_piece(int group, SlotPool& pool, cuda::StreamView stream);
  [[nodiscard]] bool has_group_piece() const noexcept { return group_slot_ != nullptr; }
  /// As gather(), from the pieces that the group's ranks kept. `comm` is the group's.
  comm::Ticket gather_from_group(SlotPool& pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info);
  void drop_group_piece(SlotPool& pool, cuda::StreamView last_user);
  /// One rank, nothing accumulated: unsharded gradients go straight into the sharded ones on `stream`.
  void reduce_locally(cuda::StreamView stream);
  /// Forgets unsharded and accumulated gradients.
  void drop_gradients(SlotPool& pool, cuda::StreamView stream);

 private:
  [[nodiscard]] bool casts() const noexcept { return config_.dtype != config_.gathered_dtype; }
  [[nodiscard]] bool keeps_cast() const noexcept { return config_.keep_cast && casts() && !config_.offload_params; }
  [[nodiscard]] bool cast_is_current() const noexcept;
  [[nodiscard]] at::Tensor make_slice(c10::ScalarType dtype, bool on_host, bool zeroed) const;
  [[nodiscard]] c10::ScalarType sharded_dtype(bool keep_reduce_dtype) const noexcept;
  [[nodiscard]] c10::ScalarType gradient_dtype(bool sharded) const noexcept {
    return sharded ? sharded_grad_dtype_ : config_.reduce_dtype;
  }
  void set_scales();
  [[nodiscard]] std::optional<c10::ScalarType> dtype_of_replaced_handles() const;
  void change_dtype(c10::ScalarType dtype);
  void make_storages(at::Tensor shard);
  void make_views_of(ParamState& param);
  void make_views(const std::vector<at::Tensor>& handles);
  void store_reduced_slice(SlotPool& staging_pool, cuda::StreamView stream, double scale, bool accumulate);
  void begin_gradients(bool valid);
  void begin_in_place(cuda::StreamView stream, at::Tensor memory = {});
  void pack_gradients(void* dst, c10::ScalarType dst_dtype, double scale, cuda::StreamView stream);
  [[nodiscard]] std::vector<kernels::PackPiece> collect_pieces(bool valid, std::vector<at::Tensor>& keep);
  bool prepare_sharded_gradients(cuda::StreamView stream, at::Tensor memory = {});
  [[nodiscard]] at::Tensor sharded_gradient_buffer() const;
  void publish_sharded_gradients();
  [[nodiscard]] char* reduced_slice() const noexcept;

  Config config_;
  double divide_factor_ = 1.0;
  shard::Plan plan_;
  std::vector<ParamState> params_;
  std::vector<kernels::PackPiece> gaps_;  ///< the padding of the flat buffer
  std::vector<bool> with_grad_;           ///< parameters whose gradient is in the gradient buffer
  std::vector<bool> valid_;               ///< parameters whose place there holds a value: to be added to
  bool gaps_valid_ = false;
  bool freed_in_backward_ = false;        ///< see expect_early_free()
  bool unpacked_ = false;                 ///< targets were handed out since the last pack
  bool in_place_ = false;                 ///< gradients of the running backward go into sharded_grad_
  bool aliased_ = false, reducing_ = false;
  bool cast_valid_ = false;               ///< the cast shard was filled, and no write is known that left no version
  at::Tensor shard_;                                  ///< 1-D [slice], original dtype; host memory if offloaded
  at::Tensor cast_shard_;                             ///< 1-D [slice], gathered dtype, if it is kept
  c10::intrusive_ptr<c10::StorageImpl> gathered_;     ///< [world · slice], gathered dtype
  SlotPool::Slot* gathered_slot_ = nullptr;
  SlotPool::Slot* grad_slot_ = nullptr;               ///< [world · slice], reduce dtype
  struct EarlyMemory;
  std::weak_ptr<EarlyMemory> early_;                  ///< given out by early_gradient()
  SlotPool::Slot* group_slot_ = nullptr;              ///< [world · slice / group], gathered dtype
  at::Tensor partial_;                                ///< 1-D [slice], reduce dtype: reduced, not yet all-reduced
  at::Tensor sharded_grad_;                           ///< 1-D [slice], sharded_grad_dtype_; held while being written
  WeakStorage sharded_grad_storage_{c10::intrusive_ptr<c10::StorageImpl>()};  ///< the same afterwards: the gradients own it
  c10::ScalarType sharded_grad_dtype_;                ///< the original dtype, but see keep_reduce_dtype()
  double pre_scale_ = 1.0, post_scale_ = 1.0;         ///< before and after the sum; together 1 / world
};

}  // namespace fsdpp::engine

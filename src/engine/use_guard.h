#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdpp::engine {

class Unit;

/// [Note: Use guard] Every view that a parameter handle can show (local shard, gathered parameter) carries a dispatch key of
/// its own, which tensors made as views of it inherit. Operators on such tensors first come by a fallback that
///  - inside backward makes the unit's gathered memory valid when an operator needs it and no output hook has done so (a loss
///    built on a tensor that the forward kept aside);
///  - outside turns the use of a sharded parameter in a computation into an error that says what to do.
/// Tensors on the meta device that deferred initialisation made carry the key too: their fallback records (deferred_ops.h).
/// The key is DeferredInit: reserved by LibTorch for code outside its tree and above autograd.

/// A contiguous tensor on `storage` at an element offset; no view in autograd's sense (detach_ works on it).
[[nodiscard]] at::Tensor make_tensor_on(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes, int64_t storage_offset);
/// The same, carrying the guard's key.
[[nodiscard]] at::Tensor make_guarded_tensor_on(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes,
                                                int64_t storage_offset);
/// A view of all of `tensor`, strides included, carrying the guard's key.
[[nodiscard]] at::Tensor make_guarded_view(const at::Tensor& tensor);

/// Makes `handle` show `view`: what set_data does, without its dispatch and its reset of the gradient accumulator, which the
/// engine keeps itself.
void point_handle(const at::Tensor& handle, const at::Tensor& view);

/// Tells the guard which unit a storage belongs to, and forgets it.
void guard_storage(const void* storage, std::weak_ptr<Unit> unit);
void unguard_storage(const void* storage) noexcept;

/// While alive on this thread, sharded parameters may be used freely (the engine's own work, user hooks on sharded gradients).
class ShardAccess {
 public:
  ShardAccess();
  ~ShardAccess();
  ShardAccess(const ShardAccess&) = delete;
  ShardAccess& operator=(const ShardAccess&) = delete;
};

}  // namespace fsdpp::engine

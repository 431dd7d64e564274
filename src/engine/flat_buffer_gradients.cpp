// The way of gradients through a flat buffer: packed, reduced, kept as sharded gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "base/enforce.h"
#include "engine/flat_buffer.h"
#include "engine/use_guard.h"
#include "shard/kernel_call.h"

namespace fsdpp::engine {

using shard::kernel_dtype;
using shard::run_cast;
using shard::run_pack;

namespace {

// fp16 sums overflow and means underflow: divide by about sqrt(world) before and the rest after. Others: after, once.
double pre_scale_for(c10::ScalarType reduce_dtype, int world_size) {
  if (reduce_dtype != c10::ScalarType::Half) return 1.0;
  int factor = 1;
  while (world_size % factor == 0 && world_size / factor > factor) factor *= 2;
  return 1.0 / factor;
}

}  // namespace

void ParamState::put_grad_aside(const at::Tensor& live_handle) {
  if (grad_put_aside) return;
  grad_put_aside = true;
  sharded_grad = std::exchange(live_handle.mutable_grad(), at::Tensor());
}

void FlatBuffer::set_scales() {
  pre_scale_ = pre_scale_for(config_.reduce_dtype, config_.world_size * config_.replicate_size);
  post_scale_ = 1.0 / divide_factor_ / pre_scale_;
}

bool FlatBuffer::has_unsharded_grads() const noexcept {
  return std::any_of(params_.begin(), params_.end(), [](auto& p) { return p.unsharded_grad.defined(); });
}

bool FlatBuffer::trains() const noexcept {
  return std::any_of(params_.begin(), params_.end(), [](auto& p) {
    auto h = p.handle();
    return h.defined() && h.requires_grad();
  });
}

// New memory for gradients; `valid`: it holds something to add to.
void FlatBuffer::begin_gradients(bool valid) {
  valid_.assign(params_.size(), valid);
  gaps_valid_ = valid;
}

// Places that hold a value already, to be added to, or those that don't: gradients, and zeros for what is missing.
std::vector<kernels::PackPiece> FlatBuffer::collect_pieces(bool valid, std::vector<at::Tensor>& keep) {
  std::vector<kernels::PackPiece> pieces;
  if (!valid && !gaps_valid_) pieces = gaps_;
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& grad = params_[i].unsharded_grad;
    auto& placement = plan_.params[i];
    if (grad.defined()) with_grad_[i] = true;
    if (placement.numel == 0 || valid_[i] != valid || (valid && !grad.defined())) continue;
    const void* source = nullptr;
    if (grad.defined()) {
      auto dense = grad.layout() == c10::kStrided ? grad : grad.to_dense();
      keep.push_back(dense.to(config_.gathered_dtype).contiguous());
      source = keep.back().const_data_ptr();
    }
    pieces.push_back({source, placement.offset, placement.numel});
  }
  return pieces;
}

void FlatBuffer::pack_gradients(void* dst, c10::ScalarType dst_dtype, double scale, cuda::StreamView stream) {
  for (bool valid : {true, false}) {
    std::vector<at::Tensor> keep;
    auto pieces = collect_pieces(valid, keep);
    if (pieces.empty()) continue;
    run_pack({.dst = dst, .dst_dtype = kernel_dtype(dst_dtype), .src_dtype = kernel_dtype(config_.gathered_dtype),
              .pieces = pieces.data(), .count = static_cast<int>(pieces.size()), .scale = scale, .accumulate = valid}, stream);
  }
  for (auto& p : params_) p.unsharded_grad = at::Tensor();
  begin_gradients(/*valid=*/true);
  unpacked_ = false;
}

void FlatBuffer::accumulate(SlotPool& pool, cuda::StreamView stream) {
  if (!grad_slot_) {
    grad_slot_ = pool.acquire(gradient_bytes(), stream);
    begin_gradients(/*valid=*/false);
  }
  pack_gradients(grad_slot_->data(), config_.reduce_dtype, pre_scale_, stream);
}

c10::ScalarType FlatBuffer::sharded_dtype(bool keep_reduce_dtype) const noexcept {
  bool narrower = c10::elementSize(config_.reduce_dtype) < c10::elementSize(config_.dtype);
  bool alone = config_.world_size * config_.replicate_size == 1;
  bool may = narrower && alone && pre_scale_ * post_scale_ == 1.0 && !config_.offload_gradients;
  return keep_reduce_dtype && may ? config_.reduce_dtype : config_.dtype;
}

void FlatBuffer::keep_reduce_dtype(bool keep) noexcept {
  if (in_place_ || sharded_grad_.defined() || !early_.expired()) return;
  sharded_grad_dtype_ = sharded_dtype(keep);
}

int64_t FlatBuffer::sharded_gradient_bytes(bool reduce_dtype) const noexcept {
  return plan_.slice_numel * static_cast<int64_t>(c10::elementSize(sharded_dtype(reduce_dtype)));
}

bool FlatBuffer::takes_targets(bool in_place) const noexcept {
  if (plan_.slice_numel == 0 || !c10::isFloatingType(config_.dtype)) return false;
  return pre_scale_ == 1.0 && (!in_place || post_scale_ == 1.0);
}

// Owned by the tensor that early_gradient() gave out; what target() takes over is empty here.
struct FlatBuffer::EarlyMemory {
  std::shared_ptr<SlotPool> pool;
  SlotPool::Slot* slot = nullptr;
  at::Tensor slice;
  void* place = nullptr;  ///< of the gradient in it
  cuda::StreamView stream;
  EarlyMemory(std::shared_ptr<SlotPool> p, cuda::StreamView s) : pool(std::move(p)), stream(s) {}
  ~EarlyMemory() {
    try {
      pool->release(slot, stream);
    } catch (...) {  // a lost device: the memory goes with the pool
    }
  }
  EarlyMemory(const EarlyMemory&) = delete;
  EarlyMemory& operator=(const EarlyMemory&) = delete;
};

std::optional<at::Tensor> FlatBuffer::early_gradient(bool in_place, std::shared_ptr<SlotPool> pool, cuda::StreamView stream) {
  auto handle = params_.front().handle();
  if (params_.size() > 1 || !handle.defined() || has_accumulated() || reducing_ || !early_.expired()) return std::nullopt;
  if (in_place && handle.grad().defined()) return std::nullopt;
  auto early = std::make_shared<EarlyMemory>(std::move(pool), stream);
  if (in_place)
    early->slice = make_slice(sharded_grad_dtype_, /*on_host=*/false, /*zeroed=*/false);
  else
    early->slot = early->pool->acquire(gradient_bytes(), stream);
  early_ = early;
  auto dtype = gradient_dtype(in_place);
  early->place = at_element(in_place ? early->slice.mutable_data_ptr() : early->slot->data(), plan_.params.front().offset, dtype);
  return at::from_blob(early->place, params_.front().sizes, [early](void*) {}, at::TensorOptions(config_.device).dtype(dtype));
}

GradientTarget FlatBuffer::target(size_t param, bool in_place, SlotPool& pool, cuda::StreamView stream, const at::Tensor& early) {
  auto given = early_.lock();
  auto* memory = given && early.defined() && given->place == early.data_ptr() ? given.get() : nullptr;
  if (in_place) {
    begin_in_place(stream, memory ? memory->slice : at::Tensor());
    if (memory && sharded_grad_.is_same(memory->slice)) memory->slice = at::Tensor();
  } else if (!grad_slot_) {
    grad_slot_ = memory && memory->slot ? std::exchange(memory->slot, nullptr) : pool.acquire(gradient_bytes(), stream);
    begin_gradients(/*valid=*/false);
  }
  auto dtype = gradient_dtype(in_place);
  void* base = in_place ? sharded_grad_.mutable_data_ptr() : grad_slot_->data();
  void* place = at_element(base, plan_.params[param].offset, dtype);
  unpacked_ = true;
  with_grad_[param] = true;
  bool accumulate = valid_[param];
  valid_[param] = true;
  return {at::from_blob(place, params_[param].sizes, at::TensorOptions(config_.device).dtype(dtype)), accumulate};
}

comm::Ticket FlatBuffer::reduce_scatter(comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  reducing_ = true;
  if (config_.world_size == 1) return {};
  int64_t n = plan_.slice_numel;
  void* base = grad_slot_->data();
  comm::Buffer own{at_element(base, config_.rank * n, config_.reduce_dtype), n, config_.reduce_dtype};
  return comm.reduce_scatter(own, {base, plan_.total_numel(), config_.reduce_dtype}, comm::ReduceOp::Sum, stream, info);
}

// The flat buffer that the gradients put aside are views of; undefined if the user replaced all of them.
at::Tensor FlatBuffer::sharded_gradient_buffer() const {
  auto storage = sharded_grad_storage_.lock();
  if (!storage) return {};
  return make_tensor_on(c10::Storage(std::move(storage)), sharded_grad_dtype_, {plan_.slice_numel}, 0);
}

// True when the sharded gradients hold something to add to. Afterwards sharded_grad_ has room for all of them.
// `memory`, if given, becomes them where there are none.
bool FlatBuffer::prepare_sharded_gradients(cuda::StreamView stream, at::Tensor memory) {
  at::NoGradGuard no_grad;
  for (auto& p : params_)  // also what this backward did not reach: it lives in the same memory
    if (auto h = p.handle(); h.defined() && h.requires_grad()) p.put_grad_aside(h);
  bool any = std::any_of(params_.begin(), params_.end(), [](auto& p) { return p.sharded_grad.defined(); });
  if (any) sharded_grad_dtype_ = config_.dtype;  // as whatever the user can see
  sharded_grad_ = any ? sharded_gradient_buffer() : at::Tensor();
  if (!sharded_grad_.defined()) {  // what runs on `stream` overwrites all of it, padding included
    cuda::StreamGuard owner(freed_in_backward_ ? stream : cuda::current_stream(config_.device));
    sharded_grad_ = memory.defined() && !any
                        ? std::move(memory)
                        : make_slice(sharded_grad_dtype_, config_.offload_gradients, /*zeroed=*/any);
  }
  if (!any) return false;
  stream.wait(cuda::current_stream(config_.device));
  cuda::StreamGuard guard(stream);
  for (auto& p : params_) {
    auto view = local_view(sharded_grad_, p);
    if (!p.sharded_grad.defined())
      view.zero_();
    else if (p.sharded_grad.data_ptr() != view.data_ptr())
      view.copy_(p.sharded_grad);
  }
  return true;
}

void FlatBuffer::publish_sharded_gradients() {
  at::NoGradGuard no_grad;
  bool complete = true;
  for (size_t i = 0; i < params_.size(); ++i) {
    complete = complete && with_grad_[i];
    if (!with_grad_[i] && !params_[i].sharded_grad.defined()) continue;
    params_[i].sharded_grad = local_view(sharded_grad_, params_[i]);
    params_[i].reduced = params_[i].reduced || with_grad_[i];
    with_grad_[i] = false;
  }
  auto* storage = sharded_grad_.storage().unsafeGetStorageImpl();
  sharded_grad_storage_ = WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  const bool alone = config_.world_size * config_.replicate_size == 1;
  if (complete || alone) sharded_grad_ = at::Tensor();  // from now on the handles' gradients keep it
}

void FlatBuffer::adopt_gradient(size_t param) {
  auto& p = params_[param];
  p.reduced = true;
  if (p.sharded_grad.defined()) return;
  at::NoGradGuard no_grad;
  p.sharded_grad = local_view(sharded_grad_, p);
}

void FlatBuffer::end_backward() {
  for (auto& p : params_) p.reduced = false;
  sharded_grad_ = at::Tensor();
}

char* FlatBuffer::reduced_slice() const noexcept {
  return at_element(grad_slot_->data(), config_.rank * plan_.slice_numel, config_.reduce_dtype);
}

comm::Ticket FlatBuffer::all_reduce(comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  auto dtype = kernel_dtype(config_.reduce_dtype);
  if (partial_.defined() && plan_.slice_numel > 0)
    run_cast({.dst = reduced_slice(), .dst_dtype = dtype, .src = partial_.const_data_ptr(), .src_dtype = dtype,
              .numel = plan_.slice_numel, .accumulate = true}, stream);
  partial_ = at::Tensor();
  comm::Buffer slice{reduced_slice(), plan_.slice_numel, config_.reduce_dtype};
  return comm.all_reduce(slice, slice, comm::ReduceOp::Sum, stream, info);
}

void FlatBuffer::keep_partial(SlotPool& pool, cuda::StreamView stream) {
  auto dtype = kernel_dtype(config_.reduce_dtype);
  bool first = !partial_.defined();
  if (first) partial_ = at::empty({plan_.slice_numel}, at::TensorOptions(config_.device).dtype(config_.reduce_dtype));
  if (plan_.slice_numel > 0)
    run_cast({.dst = partial_.mutable_data_ptr(), .dst_dtype = dtype, .src = reduced_slice(), .src_dtype = dtype,
              .numel = plan_.slice_numel, .accumulate = !first}, stream);
  pool.release(std::exchange(grad_slot_, nullptr), stream);
  reducing_ = false;
}

void FlatBuffer::finish_reduce(SlotPool& pool, SlotPool& staging_pool, cuda::StreamView stream, const ReducedHook& hook) {
  bool accumulate = prepare_sharded_gradients(stream);
  auto reduce_dtype = kernel_dtype(config_.reduce_dtype);
  int64_t n = plan_.slice_numel;
  double scale = post_scale_;
  if (hook && n > 0) {
    run_cast({.dst = reduced_slice(), .dst_dtype = reduce_dtype, .src = reduced_slice(), .src_dtype = reduce_dtype, .numel = n, .scale = scale}, stream);
    cuda::StreamGuard guard(stream);
    hook(at::from_blob(reduced_slice(), {n}, at::TensorOptions(config_.device).dtype(config_.reduce_dtype)));
    scale = 1.0;
  }
  if (n > 0) store_reduced_slice(staging_pool, stream, scale, accumulate);
  pool.release(std::exchange(grad_slot_, nullptr), stream);
  reducing_ = false;
  publish_sharded_gradients();
}

// The reduced slice in the original dtype, into the sharded gradients: straight, or by way of the device if they are offloaded.
void FlatBuffer::store_reduced_slice(SlotPool& staging_pool, cuda::StreamView stream, double scale, bool accumulate) {
  void* host = config_.offload_gradients ? sharded_grad_.mutable_data_ptr() : nullptr;
  auto* staging = host ? staging_pool.acquire(shard_bytes(), stream) : nullptr;
  void* dst = host ? staging->data() : sharded_grad_.mutable_data_ptr();
  if (host && accumulate) stream.copy(dst, host, shard_bytes());
  run_cast({.dst = dst,
            .dst_dtype = kernel_dtype(sharded_grad_dtype_),
            .src = reduced_slice(),
            .src_dtype = kernel_dtype(config_.reduce_dtype),
            .numel = plan_.slice_numel,
            .scale = scale,
            .accumulate = accumulate},
           stream);
  if (host) stream.copy(host, dst, shard_bytes());
  staging_pool.release(staging, stream);
}

void FlatBuffer::set_divide_factor(double factor) {
  divide_factor_ = factor;
  set_scales();
}

void FlatBuffer::use_zeros_for_missing() noexcept {
  for (size_t i = 0; i < params_.size(); ++i)
    if (auto h = params_[i].handle(); h.defined() && h.requires_grad()) with_grad_[i] = true;
}

void FlatBuffer::begin_in_place(cuda::StreamView stream, at::Tensor memory) {
  if (std::exchange(in_place_, true)) return;
  begin_gradients(/*valid=*/prepare_sharded_gradients(stream, std::move(memory)));
}

void FlatBuffer::reduce_locally(cuda::StreamView stream) {
  begin_in_place(stream);
  pack_gradients(sharded_grad_.mutable_data_ptr(), sharded_grad_dtype_, pre_scale_ * post_scale_, stream);
  in_place_ = false;
  publish_sharded_gradients();
}

void FlatBuffer::drop_gradients(SlotPool& pool, cuda::StreamView stream) {
  for (auto& p : params_) p.unsharded_grad = at::Tensor();
  with_grad_.assign(params_.size(), false);
  in_place_ = unpacked_ = false;
  sharded_grad_ = at::Tensor();
  pool.release(std::exchange(grad_slot_, nullptr), stream);
  partial_ = at::Tensor();
  reducing_ = false;
}

}  // namespace fsdpp::engine

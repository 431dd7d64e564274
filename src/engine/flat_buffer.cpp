#include "engine/flat_buffer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "base/enforce.h"
#include "engine/kernel_call.h"
#include "engine/use_guard.h"
#include "shard/local_shape.h"

namespace fsdpp::engine {
namespace {

shard::ParamShape shape_of(at::IntArrayRef sizes) {
  int64_t rows = sizes.empty() ? 1 : sizes[0];
  int64_t row_numel = 1;
  for (size_t d = 1; d < sizes.size(); ++d) row_numel *= sizes[d];
  return {rows, row_numel};
}

shard::PlanOptions plan_options(const FlatBuffer::Config& config) {
  auto narrowest = static_cast<int64_t>(std::min({c10::elementSize(config.dtype), c10::elementSize(config.gathered_dtype),
                                                  c10::elementSize(config.reduce_dtype)}));
  shard::PlanOptions options;
  options.world_size = config.world_size;
  options.param_align = 16 / narrowest;
  options.slice_align = 128 / narrowest;
  return options;
}

// Padding between parameters and behind the last one, as pieces without a source.
std::vector<kernels::PackPiece> find_gaps(const shard::Plan& plan) {
  std::vector<size_t> order(plan.params.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return plan.params[a].offset < plan.params[b].offset; });
  std::vector<kernels::PackPiece> gaps;
  int64_t end = 0;
  for (auto i : order) {
    if (plan.params[i].numel == 0) continue;
    if (plan.params[i].offset > end) gaps.push_back({nullptr, end, plan.params[i].offset - end});
    end = plan.params[i].offset + plan.params[i].numel;
  }
  if (plan.total_numel() > end) gaps.push_back({nullptr, end, plan.total_numel() - end});
  return gaps;
}

// fp16 sums overflow and means underflow: divide by about sqrt(world) before and the rest after. Others: after, once.
double pre_scale_for(c10::ScalarType reduce_dtype, int world_size) {
  if (reduce_dtype != c10::ScalarType::Half) return 1.0;
  int factor = 1;
  while (world_size % factor == 0 && world_size / factor > factor) factor *= 2;
  return 1.0 / factor;
}

char* at_element(void* base, int64_t element, c10::ScalarType dtype) {
  return static_cast<char*>(base) + element * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

kernels::DType kernel_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return kernels::DType::F32;
    case c10::ScalarType::Double: return kernels::DType::F64;
    case c10::ScalarType::Half: return kernels::DType::F16;
    case c10::ScalarType::BFloat16: return kernels::DType::BF16;
    default: fail<ConfigError>("dtype {} can't be cast or reduced: expected float32, float64, float16 or bfloat16", c10::toString(type));
  }
}

at::Tensor ParamState::handle() const {
  auto impl = weak_handle.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

void ParamState::put_grad_aside(const at::Tensor& live_handle) {
  if (grad_put_aside) return;
  grad_put_aside = true;
  sharded_grad = std::exchange(live_handle.mutable_grad(), at::Tensor());
}

FlatBuffer::FlatBuffer(const Config& config, std::vector<at::Tensor> handles, std::vector<std::string> names) : config_(config) {
  std::vector<shard::ParamShape> shapes;
  shapes.reserve(handles.size());
  for (auto& h : handles) shapes.push_back(shape_of(h.sizes()));
  plan_ = shard::make_plan(shapes, plan_options(config));
  gaps_ = find_gaps(plan_);
  aliased_ = config.world_size == 1 && config.dtype == config.gathered_dtype;
  pre_scale_ = pre_scale_for(config.reduce_dtype, config.world_size * config.replicate_size);
  set_divide_factor(config.world_size * config.replicate_size);
  params_.resize(handles.size());
  with_grad_.assign(handles.size(), false);
  for (size_t i = 0; i < handles.size(); ++i) {
    params_[i].name = std::move(names[i]);
    params_[i].weak_handle = WeakHandle(handles[i].getIntrusivePtr());
    params_[i].sizes = handles[i].sizes().vec();
    params_[i].plan_index = i;
  }
  make_views(handles);
}

FlatBuffer::~FlatBuffer() {
  unguard_storage(shard_storage());
  unguard_storage(gathered_storage());
}

int64_t FlatBuffer::gathered_bytes() const noexcept {
  return aliased_ ? 0 : plan_.total_numel() * static_cast<int64_t>(c10::elementSize(config_.gathered_dtype));
}

int64_t FlatBuffer::gradient_bytes() const noexcept {
  return plan_.total_numel() * static_cast<int64_t>(c10::elementSize(config_.reduce_dtype));
}

void FlatBuffer::make_views(const std::vector<at::Tensor>& handles) {
  at::NoGradGuard no_grad;
  auto options = at::TensorOptions(config_.device).dtype(config_.dtype);
  shard_ = at::zeros({plan_.slice_numel}, options);
  if (aliased_) {
    gathered_ = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(shard_.storage().unsafeGetStorageImpl());
  } else {
    gathered_ = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(gathered_bytes()), c10::DataPtr(nullptr, config_.device),
        c10::GetAllocator(config_.device.type()), /*resizable=*/false);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& p = params_[i];
    auto range = plan_.local_range(i, config_.rank);
    if (range.size() > 0) {
      auto source = handles[i].detach().contiguous().view({-1}).narrow(0, range.begin, range.size());
      local_view(shard_, p).view({-1}).copy_(source);
    }
    auto local = local_view(shard_, p);
    p.shard_view = make_guarded_tensor_on(shard_.storage(), config_.dtype, local.sizes(), local.storage_offset());
    p.gathered_view = make_guarded_tensor_on(c10::Storage(gathered_), config_.gathered_dtype, p.sizes, plan_.params[i].offset);
    point_handle(handles[i], p.shard_view);
    torch::autograd::impl::set_grad_accumulator(handles[i], {});
  }
}

at::Tensor FlatBuffer::local_view(const at::Tensor& flat, const ParamState& param) const {
  auto range = plan_.local_range(param.plan_index, config_.rank);
  auto& placement = plan_.params[param.plan_index];
  int64_t offset = range.size() > 0 ? placement.offset + range.begin - config_.rank * plan_.slice_numel : 0;
  return make_tensor_on(flat.storage(), flat.scalar_type(), shard::local_sizes(param.sizes, placement.cut, range), offset);
}

comm::Ticket FlatBuffer::gather(SlotPool& pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  if (aliased_ || plan_.slice_numel == 0) return {};
  gathered_slot_ = pool.acquire(gathered_bytes(), stream);
  void* base = gathered_slot_->data();
  gathered_->set_data_ptr_noswap(c10::DataPtr(base, config_.device));
  int64_t n = plan_.slice_numel;
  bool cast = config_.dtype != config_.gathered_dtype;
  void* own = at_element(base, config_.rank * n, config_.gathered_dtype);
  if (cast)
    run_cast({.dst = own, .dst_dtype = kernel_dtype(config_.gathered_dtype), .src = shard_.const_data_ptr(),
              .src_dtype = kernel_dtype(config_.dtype), .numel = n}, stream);
  if (config_.world_size == 1) return {};
  comm::ConstBuffer in(cast ? own : shard_.const_data_ptr(), n, config_.gathered_dtype);
  return comm.all_gather({base, plan_.total_numel(), config_.gathered_dtype}, in, stream, info);
}

void FlatBuffer::free_gathered(SlotPool& pool, cuda::StreamView last_user) {
  if (!gathered_slot_) return;
  gathered_->set_data_ptr_noswap(c10::DataPtr(nullptr, config_.device));
  pool.release(std::exchange(gathered_slot_, nullptr), last_user);
}

bool FlatBuffer::adopt_replaced_handles() {
  bool adopted = false;
  for (auto& p : params_) {
    auto handle = p.handle();
    if (!handle.defined() || handle.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() == shard_storage()) continue;
    FSDPP_ENFORCE(handle.device() == config_.device && handle.scalar_type() == config_.dtype && handle.sizes() == p.shard_view.sizes(),
                  UsageError, "parameter '{}' was replaced after fully_shard: expected its local shard {} {} on {}, got {} {} on {}. "
                  "Try: move or convert the module before fully_shard.", p.name, c10::toString(config_.dtype),
                  fmt::join(p.shard_view.sizes(), "x"), config_.device.str(), c10::toString(handle.scalar_type()),
                  fmt::join(handle.sizes(), "x"), handle.device().str());
    at::NoGradGuard no_grad;
    ShardAccess access;
    p.shard_view.copy_(handle.detach());
    point_handle(handle, p.shard_view);
    adopted = true;
  }
  return adopted;
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

void FlatBuffer::pack_gradients(void* dst, c10::ScalarType dst_dtype, double scale, bool accumulate, cuda::StreamView stream) {
  std::vector<at::Tensor> keep;
  std::vector<kernels::PackPiece> pieces(accumulate ? std::vector<kernels::PackPiece>{} : gaps_);
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& grad = params_[i].unsharded_grad;
    auto& placement = plan_.params[i];
    if (placement.numel == 0) {
      with_grad_[i] = with_grad_[i] || grad.defined();
      continue;
    }
    if (grad.defined()) {
      auto dense = grad.layout() == c10::kStrided ? grad : grad.to_dense();
      keep.push_back(dense.to(config_.gathered_dtype).contiguous());
      pieces.push_back({keep.back().const_data_ptr(), placement.offset, placement.numel});
      with_grad_[i] = true;
    } else if (!accumulate) {
      pieces.push_back({nullptr, placement.offset, placement.numel});
    }
  }
  run_pack({.dst = dst, .dst_dtype = kernel_dtype(dst_dtype), .src_dtype = kernel_dtype(config_.gathered_dtype),
            .pieces = pieces.data(), .count = static_cast<int>(pieces.size()), .scale = scale, .accumulate = accumulate}, stream);
  for (auto& p : params_) p.unsharded_grad = at::Tensor();
}

void FlatBuffer::accumulate(SlotPool& pool, cuda::StreamView stream) {
  bool first = grad_slot_ == nullptr;
  if (first) grad_slot_ = pool.acquire(gradient_bytes(), stream);
  pack_gradients(grad_slot_->data(), config_.reduce_dtype, pre_scale_, !first, stream);
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
  return make_tensor_on(c10::Storage(std::move(storage)), config_.dtype, {plan_.slice_numel}, 0);
}

// True when the sharded gradients hold something to add to. Afterwards sharded_grad_ has room for all of them.
bool FlatBuffer::prepare_sharded_gradients(cuda::StreamView stream) {
  at::NoGradGuard no_grad;
  bool any = std::any_of(params_.begin(), params_.end(), [](auto& p) { return p.sharded_grad.defined(); });
  // Memory of the current stream; what runs on `stream` overwrites all of it, padding included.
  sharded_grad_ = any ? sharded_gradient_buffer() : at::Tensor();
  auto options = at::TensorOptions(config_.device).dtype(config_.dtype);
  if (!sharded_grad_.defined()) sharded_grad_ = any ? at::zeros({plan_.slice_numel}, options) : at::empty({plan_.slice_numel}, options);
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
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!with_grad_[i] && !params_[i].sharded_grad.defined()) continue;
    params_[i].sharded_grad = local_view(sharded_grad_, params_[i]);
    with_grad_[i] = false;
  }
  auto* storage = sharded_grad_.storage().unsafeGetStorageImpl();
  sharded_grad_storage_ = WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  sharded_grad_ = at::Tensor();  // from now on the handles' gradients keep it
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

void FlatBuffer::finish_reduce(SlotPool& pool, cuda::StreamView stream, const ReducedHook& hook) {
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
  if (n > 0)
    run_cast({.dst = sharded_grad_.mutable_data_ptr(), .dst_dtype = kernel_dtype(config_.dtype), .src = reduced_slice(),
              .src_dtype = reduce_dtype, .numel = n, .scale = scale, .accumulate = accumulate}, stream);
  pool.release(std::exchange(grad_slot_, nullptr), stream);
  reducing_ = false;
  publish_sharded_gradients();
}

void FlatBuffer::set_divide_factor(double factor) { post_scale_ = 1.0 / factor / pre_scale_; }

void FlatBuffer::use_zeros_for_missing() noexcept {
  for (size_t i = 0; i < params_.size(); ++i)
    if (auto h = params_[i].handle(); h.defined() && h.requires_grad()) with_grad_[i] = true;
}

void FlatBuffer::keep_group_piece(int group, SlotPool& pool, cuda::StreamView stream) {
  if (aliased_ || !gathered_slot_) return;
  int64_t piece = gathered_bytes() / group;
  group_slot_ = pool.acquire(piece, stream);
  stream.copy(group_slot_->data(), static_cast<char*>(gathered_slot_->data()) + config_.rank % group * piece, piece);
}

comm::Ticket FlatBuffer::gather_from_group(SlotPool& pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  gathered_slot_ = pool.acquire(gathered_bytes(), stream);
  gathered_->set_data_ptr_noswap(c10::DataPtr(gathered_slot_->data(), config_.device));
  int64_t total = plan_.total_numel();
  return comm.all_gather({gathered_slot_->data(), total, config_.gathered_dtype},
                         {group_slot_->data(), total / comm.size(), config_.gathered_dtype}, stream, info);
}

void FlatBuffer::drop_group_piece(SlotPool& pool, cuda::StreamView last_user) { pool.release(std::exchange(group_slot_, nullptr), last_user); }

void FlatBuffer::reduce_locally(cuda::StreamView stream) {
  bool accumulate = prepare_sharded_gradients(stream);
  pack_gradients(sharded_grad_.mutable_data_ptr(), config_.dtype, 1.0, accumulate, stream);
  publish_sharded_gradients();
}

void FlatBuffer::drop_gradients(SlotPool& pool, cuda::StreamView stream) {
  for (auto& p : params_) p.unsharded_grad = at::Tensor();
  with_grad_.assign(params_.size(), false);
  pool.release(std::exchange(grad_slot_, nullptr), stream);
  partial_ = at::Tensor();
  reducing_ = false;
}

}  // namespace fsdpp::engine

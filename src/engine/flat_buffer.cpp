#include "engine/flat_buffer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "base/enforce.h"
#include "engine/use_guard.h"
#include "shard/kernel_call.h"
#include "shard/local_shape.h"

namespace fsdpp::engine {

using shard::kernel_dtype;
using shard::run_cast;

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

}  // namespace

void FlatBuffer::Config::set_dtype(c10::ScalarType original) {
  dtype = original;
  gathered_dtype = param_dtype.value_or(dtype);
  reduce_dtype = policy_reduce_dtype.value_or(gathered_dtype);
  if (c10::isFloatingType(dtype))
    for (auto t : {dtype, gathered_dtype, reduce_dtype}) (void)kernel_dtype(t);
}

at::Tensor ParamState::handle() const {
  auto impl = weak_handle.lock();
  return impl ? at::Tensor(std::move(impl)) : at::Tensor();
}

FlatBuffer::FlatBuffer(const Config& config, std::vector<at::Tensor> handles, std::vector<std::string> names) : config_(config) {
  std::vector<shard::ParamShape> shapes;
  shapes.reserve(handles.size());
  for (auto& h : handles) shapes.push_back(shape_of(h.sizes()));
  plan_ = shard::make_plan(shapes, plan_options(config));
  gaps_ = find_gaps(plan_);
  divide_factor_ = config.world_size * config.replicate_size;
  sharded_grad_dtype_ = config.dtype;
  set_scales();
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
  return aliased_ || (config_.world_size == 1 && keeps_cast()) ? 0 : plan_.total_numel() * static_cast<int64_t>(c10::elementSize(config_.gathered_dtype));
}

int64_t FlatBuffer::shard_bytes() const noexcept { return plan_.slice_numel * static_cast<int64_t>(c10::elementSize(config_.dtype)); }

int64_t FlatBuffer::cast_bytes() const noexcept {
  return keeps_cast() ? plan_.slice_numel * static_cast<int64_t>(c10::elementSize(config_.gathered_dtype)) : 0;
}

int64_t FlatBuffer::gradient_bytes() const noexcept {
  return plan_.total_numel() * static_cast<int64_t>(c10::elementSize(config_.reduce_dtype));
}

// Memory for this rank's slice.
at::Tensor FlatBuffer::make_slice(c10::ScalarType dtype, bool on_host, bool zeroed) const {
  auto options = at::TensorOptions(on_host ? c10::Device(c10::kCPU) : config_.device).dtype(dtype);
  if (on_host && config_.device.is_cuda()) options = options.pinned_memory(config_.pin_memory);
  return zeroed ? at::zeros({plan_.slice_numel}, options) : at::empty({plan_.slice_numel}, options);
}

void FlatBuffer::make_storages(at::Tensor shard) {
  aliased_ = config_.world_size == 1 && !casts() && !config_.offload_params;
  shard_ = std::move(shard);
  cast_valid_ = false;
  cast_shard_ = keeps_cast() && !deferred() ? at::empty({plan_.slice_numel}, at::TensorOptions(config_.device).dtype(config_.gathered_dtype))
                                            : at::Tensor();
  const bool whole = config_.world_size == 1 && cast_shard_.defined();
  if (aliased_ || whole) {
    gathered_ = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy((whole ? cast_shard_ : shard_).storage().unsafeGetStorageImpl());
  } else {
    gathered_ = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(gathered_bytes()), c10::DataPtr(nullptr, config_.device),
        c10::GetAllocator(config_.device.type()), /*resizable=*/false);
  }
}

void FlatBuffer::make_views_of(ParamState& p) {
  auto local = local_view(shard_, p);
  p.shard_view = make_guarded_tensor_on(shard_.storage(), config_.dtype, local.sizes(), local.storage_offset());
  p.gathered_view = make_guarded_tensor_on(c10::Storage(gathered_), config_.gathered_dtype, p.sizes, plan_.params[p.plan_index].offset);
}

void FlatBuffer::make_views(const std::vector<at::Tensor>& handles) {
  at::NoGradGuard no_grad;
  bool deferred = !handles.empty() && handles.front().is_meta();
  make_storages(deferred ? at::empty({plan_.slice_numel}, at::TensorOptions(c10::kMeta).dtype(config_.dtype)) : make_shard());
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& p = params_[i];
    auto range = plan_.local_range(i, config_.rank);
    if (deferred) {
      p.on_meta = handles[i].detach();
    } else if (range.size() > 0) {
      auto source = handles[i].detach().contiguous().view({-1}).narrow(0, range.begin, range.size());
      local_view(shard_, p).view({-1}).copy_(source);
    }
    make_views_of(p);
    point_handle(handles[i], p.shard_view);
    torch::autograd::impl::set_grad_accumulator(handles[i], {});
  }
}

void FlatBuffer::take_shard(at::Tensor shard) {
  make_storages(std::move(shard));
  for (auto& p : params_) {
    make_views_of(p);
    p.on_meta = at::Tensor();
    auto handle = p.handle();
    if (!handle.defined()) continue;
    point_handle(handle, p.shard_view);
    torch::autograd::impl::set_grad_accumulator(handle, {});
  }
}

// The one dtype that all handles were converted to, if they were.
std::optional<c10::ScalarType> FlatBuffer::dtype_of_replaced_handles() const {
  std::optional<c10::ScalarType> dtype;
  for (auto& p : params_) {
    auto handle = p.handle();
    if (!handle.defined()) continue;
    if (!is_replaced(handle) || !handle.is_floating_point() || handle.sizes() != p.shard_view.sizes()) return std::nullopt;
    if (dtype.value_or(handle.scalar_type()) != handle.scalar_type()) return std::nullopt;
    dtype = handle.scalar_type();
  }
  return dtype;
}

void FlatBuffer::change_dtype(c10::ScalarType dtype) {
  unguard_storage(shard_storage());
  unguard_storage(gathered_storage());
  config_.set_dtype(dtype);
  sharded_grad_dtype_ = dtype;
  set_scales();
  make_storages(make_shard());
  for (auto& p : params_) {
    make_views_of(p);
    p.accumulator.reset();
  }
}

at::Tensor FlatBuffer::local_view(const at::Tensor& flat, const ParamState& param) const {
  auto range = plan_.local_range(param.plan_index, config_.rank);
  auto& placement = plan_.params[param.plan_index];
  int64_t offset = range.size() > 0 ? placement.offset + range.begin - config_.rank * plan_.slice_numel : 0;
  return make_tensor_on(flat.storage(), flat.scalar_type(), shard::local_sizes(param.sizes, placement.cut, range), offset);
}

bool FlatBuffer::cast_is_current() const noexcept {
  return cast_valid_ && std::all_of(params_.begin(), params_.end(), [](auto& p) {
           auto h = p.handle();
           return !h.defined() || h._version() == p.cast_version;
         });
}

void FlatBuffer::refresh_cast(cuda::StreamView stream) {
  if (!cast_shard_.defined() || cast_is_current()) return;
  run_cast({.dst = cast_shard_.mutable_data_ptr(), .dst_dtype = kernel_dtype(config_.gathered_dtype), .src = shard_.const_data_ptr(),
            .src_dtype = kernel_dtype(config_.dtype), .numel = plan_.slice_numel}, stream);
  cast_valid_ = true;
  for (size_t i = 0; i < params_.size(); ++i) note_cast_written(i);
}

at::Tensor FlatBuffer::cast_view(size_t param) const {
  return cast_shard_.defined() ? local_view(cast_shard_, params_[param]) : at::Tensor();
}

void FlatBuffer::note_cast_written(size_t param) noexcept {
  if (auto h = params_[param].handle(); h.defined()) params_[param].cast_version = h._version();
}

void FlatBuffer::take_gathered(SlotPool& pool, cuda::StreamView stream) {
  if (gathered_bytes() == 0 || gathered_slot_) return;
  gathered_slot_ = pool.acquire(gathered_bytes(), stream);
  gathered_->set_data_ptr_noswap(c10::DataPtr(gathered_slot_->data(), config_.device));
}

comm::Ticket FlatBuffer::gather(SlotPool& pool, SlotPool& staging_pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  if (aliased_ || plan_.slice_numel == 0) return {};
  refresh_cast(stream);
  if (cast_shard_.defined() && config_.world_size == 1) return {};
  take_gathered(pool, stream);
  void* base = gathered_slot_->data();
  int64_t n = plan_.slice_numel;
  void* own = at_element(base, config_.rank * n, config_.gathered_dtype);
  const bool cast_here = casts() && !cast_shard_.defined();
  const void* source = (cast_shard_.defined() ? cast_shard_ : shard_).const_data_ptr();
  auto* staging = staging_pool.acquire(staging_bytes(), stream);
  if (config_.offload_params) {
    void* arrived = staging ? staging->data() : own;
    stream.copy(arrived, source, shard_bytes());
    source = arrived;
  }
  if (cast_here)
    run_cast({.dst = own, .dst_dtype = kernel_dtype(config_.gathered_dtype), .src = source, .src_dtype = kernel_dtype(config_.dtype),
              .numel = n}, stream);
  staging_pool.release(staging, stream);
  if (config_.world_size == 1) return {};
  const void* slice = cast_here ? own : source;
  if (pool.symmetric() && slice != own) {  // in place, so that all of the operation lies in registered memory
    stream.copy(own, slice, n * static_cast<int64_t>(c10::elementSize(config_.gathered_dtype)));
    slice = own;
  }
  comm::ConstBuffer in(slice, n, config_.gathered_dtype);
  return comm.all_gather({base, plan_.total_numel(), config_.gathered_dtype}, in, stream, info);
}

void FlatBuffer::free_gathered(SlotPool& pool, cuda::StreamView last_user) {
  if (!gathered_slot_) return;
  gathered_->set_data_ptr_noswap(c10::DataPtr(nullptr, config_.device));
  pool.release(std::exchange(gathered_slot_, nullptr), last_user);
}

bool FlatBuffer::adopt_replaced_handles() {
  bool adopted = false;
  if (auto dtype = dtype_of_replaced_handles(); dtype && *dtype != config_.dtype) change_dtype(*dtype);
  for (auto& p : params_) {
    auto handle = p.handle();
    if (!handle.defined() || !is_replaced(handle)) continue;
    FSDPP_ENFORCE(handle.device() == shard_.device() && handle.scalar_type() == config_.dtype && handle.sizes() == p.shard_view.sizes(),
                  UsageError, "parameter '{}' was replaced after fully_shard: expected its local shard {} {} on {}, got {} {} on {}. "
                  "Try: move or convert the module before fully_shard.", p.name, c10::toString(config_.dtype),
                  fmt::join(p.shard_view.sizes(), "x"), shard_.device().str(), c10::toString(handle.scalar_type()),
                  fmt::join(handle.sizes(), "x"), handle.device().str());
    at::NoGradGuard no_grad;
    ShardAccess access;
    p.shard_view.copy_(handle.detach());
    point_handle(handle, p.shard_view);
    adopted = true;
  }
  return adopted;
}

void FlatBuffer::keep_group_piece(int group, SlotPool& pool, cuda::StreamView stream) {
  if (aliased_ || !gathered_slot_) return;
  int64_t piece = gathered_bytes() / group;
  group_slot_ = pool.acquire(piece, stream);
  stream.copy(group_slot_->data(), static_cast<char*>(gathered_slot_->data()) + config_.rank % group * piece, piece);
}

comm::Ticket FlatBuffer::gather_from_group(SlotPool& pool, comm::Communicator& comm, cuda::StreamView stream, const comm::OpInfo& info) {
  take_gathered(pool, stream);
  int64_t total = plan_.total_numel();
  return comm.all_gather({gathered_slot_->data(), total, config_.gathered_dtype},
                         {group_slot_->data(), total / comm.size(), config_.gathered_dtype}, stream, info);
}

void FlatBuffer::drop_group_piece(SlotPool& pool, cuda::StreamView last_user) { pool.release(std::exchange(group_slot_, nullptr), last_user); }

}  // namespace fsdpp::engine

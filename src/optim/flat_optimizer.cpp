#include "optim/flat_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "fsdpp/cuda/pinned.h"
#include "fsdpp/trace/scope.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

/// Two parameters of one buffer start at multiples of 16 bytes, so no third one lies in a smaller gap, only padding.
constexpr int64_t kMaxGapBytes = 15;
/// Offloaded state travels in pieces of this many elements.
constexpr int64_t kPieceNumel = int64_t{1} << 22;

c10::ScalarType state_dtype(const at::Tensor& handle) {
  return handle.scalar_type() == c10::kDouble ? c10::kDouble : c10::kFloat;
}

/// The gradient in the memory layout of the parameter, on its device.
at::Tensor with_layout_of(const at::Tensor& handle, const at::Tensor& grad) {
  const bool same_layout = grad.strides() == handle.strides() || (grad.is_contiguous() && handle.is_contiguous());
  if (same_layout && grad.device() == handle.device()) return grad;
  return at::empty_like(handle, handle.options().dtype(grad.scalar_type())).copy_(grad);
}

/// The smallest range of elements of their common storage that holds all of these parameters.
std::pair<int64_t, int64_t> span_of(const std::vector<Entry*>& entries) {
  int64_t begin = INT64_MAX;
  int64_t end = 0;
  for (const Entry* e : entries) {
    if (e->handle.numel() == 0) continue;
    begin = std::min(begin, e->handle.storage_offset());
    end = std::max(end, e->handle.storage_offset() + e->handle.numel());
  }
  return {std::min(begin, end), end};
}

at::Tensor host_zeros(int64_t numel, c10::ScalarType dtype) {
  auto memory = std::make_shared<cuda::PinnedBuffer>(static_cast<size_t>(numel) * c10::elementSize(dtype));
  if (numel == 0) return at::zeros({0}, dtype);
  return at::from_blob(
             memory->data(), {numel}, [memory](void*) {}, at::TensorOptions(dtype))
      .zero_();
}

/// Autograd must see that the parameter changed: the kernel wrote behind its back.
void bump_version(const at::Tensor& handle) {
  if (!handle.is_inference()) handle.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void FlatOptimizer::add(const ModelParams& params, size_t group) {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const Entry& e : entries_) known.insert(e.handle.unsafeGetTensorImpl());
  const auto check = [&](const std::string& name, const at::Tensor& handle) {
    FSDPP_ENFORCE(!known.contains(handle.unsafeGetTensorImpl()), UsageError,
                  "{}: expected parameters of no other group, got parameter '{}' twice", who_, name);
  };
  for (const auto& p : params.sharded) check(p.name, p.handle);
  for (const auto& p : params.plain) check(p.name, p.handle);
  for (const auto& p : params.sharded) entries_.push_back({p.name, p.handle, group, true, p.local_sizes(), p.dtype});
  for (const auto& p : params.plain) entries_.push_back({p.name, p.handle, group, false, {}, p.handle.scalar_type()});
}

void FlatOptimizer::check_handle(const Entry& e) const {
  const at::Tensor& h = e.handle;
  FSDPP_ENFORCE(!e.sharded || (h.sizes() == at::IntArrayRef(e.sizes) && h.scalar_type() == e.dtype), UsageError,
                "{}: parameter '{}' is not sharded now: expected the local shard [{}] of {}, got [{}] of {}. Try: "
                "reshard() its unit first",
                who_, e.name, fmt::join(e.sizes, ", "), c10::toString(e.dtype), fmt::join(h.sizes(), ", "),
                c10::toString(h.scalar_type()));
  FSDPP_ENFORCE(shard::has_kernel_dtype(h.scalar_type()), UsageError,
                "{}: parameter '{}': expected float32, float64, float16 or bfloat16, got {}", who_, e.name,
                c10::toString(h.scalar_type()));
  FSDPP_ENFORCE(
      h.is_non_overlapping_and_dense(), UsageError,
      "{}: parameter '{}': expected dense memory without overlap, got strides [{}]. Try: a contiguous() parameter",
      who_, e.name, fmt::join(h.strides(), ", "));
  const at::Tensor& state = e.state[0];
  FSDPP_ENFORCE(!state.defined() || (state.sizes() == h.sizes() && state.scalar_type() == state_dtype(h) &&
                                     (offloads_state(e.group) || state.device() == h.device())),
                UsageError,
                "{}: parameter '{}' has another shape, dtype or device than its state. Try: a new optimizer", who_,
                e.name);
}

/// Parameters may have been sharded since they were added.
void FlatOptimizer::find_shardings() {
  std::unordered_map<const c10::TensorImpl*, Entry*> plain;
  std::vector<at::Tensor> handles;
  for (Entry& e : entries_) {
    if (e.sharded) continue;
    plain.emplace(e.handle.unsafeGetTensorImpl(), &e);
    handles.push_back(e.handle);
  }
  for (const shard::ShardedParam& p : collect_params(handles).sharded) {
    Entry& e = *plain.at(p.handle.unsafeGetTensorImpl());
    e.sharded = true;
    e.sizes = p.local_sizes();
    e.dtype = p.dtype;
  }
}

std::vector<FlatOptimizer::Update> FlatOptimizer::checked_updates() {
  const auto is_new = [](const Entry& e) { return !e.allocated && e.handle.grad().defined(); };
  if (std::any_of(entries_.begin(), entries_.end(), is_new)) find_shardings();
  std::vector<Update> updates;
  for (Entry& e : entries_) {
    if (!e.handle.grad().defined()) continue;
    check_handle(e);
    updates.push_back({&e, with_layout_of(e.handle, checked_grad(who_, e.name, e.handle, e.handle.sizes()))});
  }
  return updates;
}

/// State of parameters of one storage: flat buffers with its layout, and each parameter's views of them.
void FlatOptimizer::allocate(const std::vector<Entry*>& entries) {
  const at::Tensor& first = entries[0]->handle;
  for (size_t k = 0; k < kMaxStates; ++k) {
    std::vector<Entry*> keepers;
    for (Entry* e : entries) {
      if (k < state_count(e->group)) keepers.push_back(e);
    }
    if (keepers.empty()) break;
    const auto [begin, end] = span_of(keepers);
    const at::Tensor flat = offloads_state(keepers[0]->group)
                                ? host_zeros(end - begin, state_dtype(first))
                                : at::zeros({end - begin}, first.options().dtype(state_dtype(first)));
    for (Entry* e : keepers) {
      const int64_t offset = e->handle.numel() == 0 ? 0 : e->handle.storage_offset() - begin;
      e->state[k] = flat.as_strided(e->handle.sizes(), e->handle.strides(), offset);
    }
    state_bytes_ += static_cast<int64_t>(flat.nbytes());
  }
  for (Entry* e : entries) e->allocated = true;
}

/// Parameters of one storage get their state together, at the first update of any of them.
void FlatOptimizer::allocate_missing(const std::vector<Update>& updates) {
  const auto missing = [](const Update& u) { return !u.entry->allocated; };
  if (std::none_of(updates.begin(), updates.end(), missing)) return;
  using Key = std::pair<const void*, bool>;
  const auto key = [&](const Entry& e) -> Key {
    return {e.handle.storage().unsafeGetStorageImpl(), offloads_state(e.group)};
  };
  std::map<Key, std::vector<Entry*>> by_storage;
  for (Entry& e : entries_) {
    if (!e.allocated && shard::has_kernel_dtype(e.handle.scalar_type())) by_storage[key(e)].push_back(&e);
  }
  for (const Update& u : updates) {
    if (missing(u)) allocate(by_storage.at(key(*u.entry)));
  }
}

FlatRange FlatOptimizer::range_of(const Update& update) const {
  const Entry& e = *update.entry;
  FlatRange range;
  range.arrays[0] = array_of(e.handle);
  range.arrays[1] = array_of(update.grad);
  for (size_t k = 0; k < kMaxStates; ++k) {
    if (e.state[k].defined()) range.arrays[StateStage::kFirst + k] = array_of(e.state[k]);
  }
  range.numel = e.handle.numel();
  range.kind = {static_cast<int64_t>(e.handle.scalar_type()), static_cast<int64_t>(update.grad.scalar_type()), phase(e),
                static_cast<int64_t>(e.group)};
  range.device = e.handle.device();
  return range;
}

StateStage& FlatOptimizer::stage_on(c10::Device device) {
  for (const auto& stage : stages_) {
    if (stage->device() == device) return *stage;
  }
  return *stages_.emplace_back(std::make_unique<StateStage>(device, kPieceNumel));
}

void FlatOptimizer::launch(const FlatRange& range, double grad_scale) {
  const auto run_piece = [&](const FlatRange& piece) {
    Run run{shard::kernel_dtype(static_cast<c10::ScalarType>(piece.kind[0])),
            shard::kernel_dtype(static_cast<c10::ScalarType>(piece.kind[1])),
            piece.arrays[0].data,
            piece.arrays[1].data,
            {},
            piece.numel,
            piece.kind[2],
            static_cast<size_t>(piece.kind[3]),
            grad_scale};
    for (size_t k = 0; k < kMaxStates; ++k) run.state[k] = piece.arrays[StateStage::kFirst + k].data;
    update(run, cuda::current_stream(piece.device));
  };
  const auto group = static_cast<size_t>(range.kind[3]);
  if (offloads_state(group) && !range.device.is_cpu() && state_count(group) > 0) {
    stage_on(range.device).update(range, run_piece);
  } else {
    run_piece(range);
  }
}

void FlatOptimizer::step(double grad_scale) {
  const trace::Scope scope(trace::Kind::Optimizer, who_);
  const at::NoGradGuard no_grad;
  const std::vector<Update> updates = checked_updates();
  allocate_missing(updates);
  std::vector<FlatRange> ranges;
  for (const Update& update : updates) {
    ++update.entry->step;
    ranges.push_back(range_of(update));
  }
  for (const auto& stage : stages_) stage->begin_step();
  for (const FlatRange& run : join_neighbours(std::move(ranges), kMaxGapBytes)) launch(run, grad_scale);
  for (const Update& update : updates) bump_version(update.entry->handle);
}

void FlatOptimizer::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (Entry& e : entries_) {
    at::Tensor& grad = e.handle.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad = at::Tensor();
    } else {
      grad.zero_();
    }
  }
}

const Entry& FlatOptimizer::entry_of(const at::Tensor& parameter) const {
  for (const auto& stage : stages_) stage->synchronize();
  for (const Entry& e : entries_) {
    if (e.handle.is_same(parameter)) return e;
  }
  fail<UsageError>("{}: expected one of this optimizer's parameters, got another tensor", who_);
}

}  // namespace fsdpp::optim

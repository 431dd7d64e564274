#include "optim/flat_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "engine/registry.h"
#include "fsdpp/cuda/graph.h"
#include "fsdpp/cuda/pinned.h"
#include "fsdpp/trace/scope.h"
#include "optim/captured_numbers.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

/// Two parameters of one buffer start at multiples of 16 bytes, so no third one lies in a smaller gap, only padding.
constexpr int64_t kMaxGapBytes = 15;
/// Offloaded state travels in pieces of this many elements.
constexpr int64_t kPieceNumel = int64_t{1} << 22;
/// Of a FlatRange, after parameter, gradient and state: the parameter's kept cast shard.
constexpr size_t kCastArray = StateStage::kEnd;
static_assert(StateStage::kFirst + kMaxStates == StateStage::kEnd);

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

// Counts go up when a graph is replayed, not when it is captured.
struct FlatOptimizer::Captured {
  struct Launch {
    Run run;
    Entry* first;  // of its entries, which count alike
  };
  Captured(const cuda::Graph& in, at::Tensor memory) : graph(&in), numbers(std::move(memory)) {}
  const cuda::Graph* graph;
  CapturedNumbers numbers;
  std::vector<Launch> launches;
  std::vector<Update> updates;
};

void FlatOptimizer::add(const ModelParams& params, size_t group) {
  const auto check = [&](const std::string& name, const at::Tensor& handle) {
    FSDPP_ENFORCE(!by_handle_.contains(handle.unsafeGetTensorImpl()), UsageError,
                  "{}: expected parameters of no other group, got parameter '{}' twice", who_, name);
  };
  for (const auto& p : params.sharded) check(p.name, p.handle);
  for (const auto& p : params.plain) check(p.name, p.handle);
  for (const auto& p : params.sharded) entries_.push_back({p.name, p.handle, group, true, p.local_sizes(), p.dtype});
  for (const auto& p : params.plain) entries_.push_back({p.name, p.handle, group, false, {}, p.handle.scalar_type()});
  for (Entry& e : entries_) by_handle_.emplace(e.handle.unsafeGetTensorImpl(), &e);
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

std::vector<FlatOptimizer::Update> FlatOptimizer::checked_updates(const std::vector<Entry*>& entries) {
  const auto is_new = [](const Entry* e) { return !e->allocated && e->handle.grad().defined(); };
  if (std::any_of(entries.begin(), entries.end(), is_new)) find_shardings();
  std::vector<Update> updates;
  for (Entry* e : entries) {
    if (!e->handle.grad().defined()) continue;
    check_handle(*e);
    updates.push_back({e, with_layout_of(e->handle, checked_grad(who_, e->name, e->handle, e->handle.sizes()))});
  }
  return updates;
}

void FlatOptimizer::find_cast_shards(std::vector<Update>& updates) const {
  if (!writes_cast()) return;
  for (Update& u : updates) {
    if (!u.entry->sharded || u.entry->handle.element_size() < 4) continue;
    auto unit = engine::find_unit(u.entry->handle);
    u.cast = unit ? unit->cast_view(u.entry->handle) : at::Tensor();
    if (u.cast.defined()) u.unit = std::move(unit);
  }
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
  if (!first.is_cuda()) return;
  std::erase_if(numbers_, [&](const at::Tensor& memory) {
    return memory.device() == first.device() && memory.numel() < static_cast<int64_t>(entries_.size()) * CapturedNumbers::kSlotBytes;
  });
  if (!numbers_on(first.device())) numbers_.push_back(CapturedNumbers::make_memory(first.device(), entries_.size()));
}

const at::Tensor* FlatOptimizer::numbers_on(c10::Device device) const {
  for (const at::Tensor& memory : numbers_) {
    if (memory.device() == device) return &memory;
  }
  return nullptr;
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
  if (update.cast.defined()) range.arrays[kCastArray] = array_of(update.cast);
  range.numel = e.handle.numel();
  range.kind = {static_cast<int64_t>(e.handle.scalar_type()), static_cast<int64_t>(update.grad.scalar_type()), phase(e),
                static_cast<int64_t>(e.group), update.cast.defined() ? static_cast<int64_t>(update.cast.scalar_type()) : -1};
  range.device = e.handle.device();
  return range;
}

StateStage& FlatOptimizer::stage_on(c10::Device device) {
  for (const auto& stage : stages_) {
    if (stage->device() == device) return *stage;
  }
  return *stages_.emplace_back(std::make_unique<StateStage>(device, kPieceNumel));
}

void FlatOptimizer::launch(const FlatRange& range, double grad_scale, Captured* captured, Entry& first) {
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
    run.cast = piece.arrays[kCastArray].data;
    if (run.cast) run.cast_dtype = shard::kernel_dtype(static_cast<c10::ScalarType>(piece.kind[4]));
    if (captured) {
      run.numbers = captured->numbers.take_slot();
      captured->launches.push_back({run, &first});
    }
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
  const at::NoGradGuard no_grad;
  std::vector<Entry*> all;
  for (Entry& e : entries_) all.push_back(&e);
  apply(checked_updates(all), grad_scale);
}

void FlatOptimizer::step_some(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<Entry*> some;
  for (const at::Tensor& p : parameters) {
    if (const auto it = by_handle_.find(p.unsafeGetTensorImpl()); it != by_handle_.end()) some.push_back(it->second);
  }
  apply(checked_updates(some), 1.0);
  for (Entry* e : some) e->handle.mutable_grad() = at::Tensor();
}

void FlatOptimizer::apply(std::vector<Update> updates, double grad_scale) {
  if (updates.empty()) return;
  const trace::Scope scope(trace::Kind::Optimizer, who_);
  c10::Device device = c10::kCPU;
  Captured* captured = nullptr;
  if (cuda::Graph* graph = capturing(updates, device)) {
    check_capturable(updates, device);
    captured = &captured_in(*graph, device);
  }
  if (!captured) allocate_missing(updates);
  find_cast_shards(updates);
  std::vector<FlatRange> ranges;
  for (const Update& update : updates) {
    if (!captured) ++update.entry->step;
    ranges.push_back(range_of(update));
  }
  for (const auto& stage : stages_) stage->begin_step();
  for (const FlatRange& run : join_neighbours(std::move(ranges), kMaxGapBytes))
    launch(run, grad_scale, captured, *updates[run.order].entry);
  if (!captured) return note_updated(updates);
  for (Update& update : updates) {
    update.grad = update.cast = at::Tensor();  // their memory may serve others later in the graph
    captured->updates.push_back(std::move(update));
  }
}

void FlatOptimizer::note_updated(const std::vector<Update>& updates) {
  for (const Update& update : updates) {
    bump_version(update.entry->handle);
    if (update.unit) update.unit->note_cast_written(update.entry->handle);
  }
}

FlatOptimizer::Captured& FlatOptimizer::captured_in(cuda::Graph& graph, c10::Device device) {
  if (const auto running = captured_.lock(); running && running->graph == &graph) return *running;
  const auto made = std::make_shared<Captured>(graph, *numbers_on(device));
  captured_ = made;
  graph.before_replay([self = shared_from_this(), made] {
    self->captured_.reset();  // the capture is over
    self->before_replay(*made);
  });
  return *made;
}

cuda::Graph* FlatOptimizer::capturing(const std::vector<Update>& updates, c10::Device& device) {
  cuda::Graph* const graph = cuda::Graph::capturing();
  if (!graph) return nullptr;
  for (const Update& u : updates) {
    device = u.entry->handle.device();
    if (cuda::current_stream(device).is_capturing()) return graph;
  }
  return nullptr;
}

void FlatOptimizer::check_capturable(const std::vector<Update>& updates, c10::Device device) const {
  for (const Update& u : updates) {
    FSDPP_ENFORCE(u.entry->handle.device() == device, UsageError,
                  "{}: expected all parameters of a captured step on {}, got '{}' on {}. Try: an optimizer for each device, this one "
                  "outside the graph", who_, device.str(), u.entry->name, u.entry->handle.device().str());
    FSDPP_ENFORCE(u.entry->allocated, UsageError,
                  "{}: expected parameter '{}' to have been updated before its update is captured in a graph. Try: some steps without "
                  "the graph first", who_, u.entry->name);
    FSDPP_ENFORCE(!offloads_state(u.entry->group), UsageError,
                  "{}: expected state on the device in a captured step, got offload_state for parameter '{}'. Try: without the graph",
                  who_, u.entry->name);
  }
}

void FlatOptimizer::before_replay(Captured& captured) {
  for (const Update& update : captured.updates) ++update.entry->step;
  captured.numbers.upload([&](size_t slot, void* out) {
    auto& launch = captured.launches[slot];
    launch.run.phase = phase(*launch.first);
    write_numbers(launch.run, out);
  });
  note_updated(captured.updates);
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

#include "fsdpp/optim/adamw.h"
#include "fsdpp/trace/scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "optim/flat_range.h"
#include "optim/kernel_call.h"
#include "optim/model_params.h"

namespace fsdpp::optim {
namespace {

constexpr const char* kStep = "AdamW::step";

/// Two parameters of one buffer start at multiples of 16 bytes, so no third one lies in a smaller gap, only padding.
constexpr int64_t kMaxGapBytes = 15;

struct Entry {
  std::string name;
  at::Tensor handle;
  bool sharded = false;
  std::vector<int64_t> sizes;  // of the local shard, if sharded
  c10::ScalarType dtype;
  at::Tensor exp_avg, exp_avg_sq;  // laid out like the handle
  int64_t step = 0;
};

struct Update {
  Entry* entry;
  at::Tensor grad;  // strides of the handle
};

c10::ScalarType state_dtype(const Entry& entry) {
  return entry.handle.scalar_type() == c10::kDouble ? c10::kDouble : c10::kFloat;
}

void check_options(const AdamWOptions& o) {
  FSDPP_ENFORCE(o.lr >= 0 && o.eps >= 0 && o.weight_decay >= 0, ConfigError,
                "AdamW: expected lr, eps and weight_decay >= 0, got {}, {}, {}", o.lr, o.eps, o.weight_decay);
  FSDPP_ENFORCE(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, ConfigError,
                "AdamW: expected betas in [0, 1), got {}, {}", o.beta1, o.beta2);
}

void check_handle(const Entry& e) {
  const at::Tensor& h = e.handle;
  FSDPP_ENFORCE(!e.sharded || (h.sizes() == at::IntArrayRef(e.sizes) && h.scalar_type() == e.dtype), UsageError,
                "{}: parameter '{}' is not sharded now: expected the local shard [{}] of {}, got [{}] of {}. Try: "
                "reshard() its unit first",
                kStep, e.name, fmt::join(e.sizes, ", "), c10::toString(e.dtype), fmt::join(h.sizes(), ", "),
                c10::toString(h.scalar_type()));
  FSDPP_ENFORCE(has_kernel_dtype(h.scalar_type()), UsageError,
                "{}: parameter '{}': expected float32, float64, float16 or bfloat16, got {}", kStep, e.name,
                c10::toString(h.scalar_type()));
  FSDPP_ENFORCE(
      h.is_non_overlapping_and_dense(), UsageError,
      "{}: parameter '{}': expected dense memory without overlap, got strides [{}]. Try: a contiguous() parameter",
      kStep, e.name, fmt::join(h.strides(), ", "));
  FSDPP_ENFORCE(!e.exp_avg.defined() || (e.exp_avg.sizes() == h.sizes() && e.exp_avg.device() == h.device() &&
                                         e.exp_avg.scalar_type() == state_dtype(e)),
                UsageError, "{}: parameter '{}' has another shape, dtype or device than its state. Try: a new AdamW",
                kStep, e.name);
}

/// The gradient in the memory layout of the parameter.
at::Tensor with_layout_of(const at::Tensor& handle, const at::Tensor& grad) {
  if (grad.strides() == handle.strides() || (grad.is_contiguous() && handle.is_contiguous())) return grad;
  return at::empty_like(handle, handle.options().dtype(grad.scalar_type())).copy_(grad);
}

/// Zero moments for parameters of one storage: two flat buffers with its layout, and each parameter's views of them.
int64_t allocate_state(const std::vector<Entry*>& entries) {
  int64_t begin = INT64_MAX;
  int64_t end = 0;
  for (const Entry* e : entries) {
    if (e->handle.numel() == 0) continue;
    begin = std::min(begin, e->handle.storage_offset());
    end = std::max(end, e->handle.storage_offset() + e->handle.numel());
  }
  begin = std::min(begin, end);
  const auto options = at::TensorOptions(entries[0]->handle.device()).dtype(state_dtype(*entries[0]));
  const at::Tensor m = at::zeros({end - begin}, options);
  const at::Tensor v = at::zeros({end - begin}, options);
  for (Entry* e : entries) {
    const int64_t offset = e->handle.numel() == 0 ? 0 : e->handle.storage_offset() - begin;
    e->exp_avg = m.as_strided(e->handle.sizes(), e->handle.strides(), offset);
    e->exp_avg_sq = v.as_strided(e->handle.sizes(), e->handle.strides(), offset);
  }
  return static_cast<int64_t>(m.nbytes() + v.nbytes());
}

FlatRange range_of(const Update& update) {
  const Entry& e = *update.entry;
  FlatRange range;
  range.arrays = {array_of(e.handle), array_of(update.grad), array_of(e.exp_avg), array_of(e.exp_avg_sq)};
  range.numel = e.handle.numel();
  range.kind = {static_cast<int64_t>(e.handle.scalar_type()), static_cast<int64_t>(update.grad.scalar_type()), e.step,
                0};
  range.device = e.handle.device();
  return range;
}

void launch(const FlatRange& range, const AdamWOptions& o, double grad_scale) {
  kernels::AdamWArgs args;
  args.param = range.arrays[0].data;
  args.param_dtype = kernel_dtype(static_cast<c10::ScalarType>(range.kind[0]));
  args.grad = range.arrays[1].data;
  args.grad_dtype = kernel_dtype(static_cast<c10::ScalarType>(range.kind[1]));
  args.exp_avg = range.arrays[2].data;
  args.exp_avg_sq = range.arrays[3].data;
  args.numel = range.numel;
  args.lr = o.lr;
  args.beta1 = o.beta1;
  args.beta2 = o.beta2;
  args.eps = o.eps;
  args.weight_decay = o.weight_decay;
  args.step = range.kind[2];
  args.grad_scale = grad_scale;
  run_kernel(
      "adamw", range.device, [&](auto stream) { return kernels::adamw(args, stream); },
      [&] { kernels::adamw_cpu(args); });
}

/// Autograd must see that the parameter changed: the kernel wrote behind its back.
void bump_version(const at::Tensor& handle) {
  if (!handle.is_inference()) handle.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

struct AdamW::Impl {
  AdamWOptions options;
  std::vector<Entry> entries;
  int64_t state_bytes = 0;

  explicit Impl(ModelParams params) {
    for (auto& p : params.sharded) entries.push_back({p.name, p.handle, true, p.local_sizes(), p.dtype, {}, {}, 0});
    for (auto& p : params.plain) entries.push_back({p.name, p.handle, false, {}, p.handle.scalar_type(), {}, {}, 0});
  }

  [[nodiscard]] std::vector<Update> checked_updates() {
    std::vector<Update> updates;
    for (Entry& e : entries) {
      if (!e.handle.grad().defined()) continue;
      check_handle(e);
      updates.push_back({&e, with_layout_of(e.handle, checked_grad(kStep, e.name, e.handle, e.handle.sizes()))});
    }
    return updates;
  }

  /// Parameters of one storage get their state together, at the first update of any of them.
  void allocate_missing(const std::vector<Update>& updates) {
    const auto missing = [](const Update& u) { return !u.entry->exp_avg.defined(); };
    if (std::none_of(updates.begin(), updates.end(), missing)) return;
    std::unordered_map<const void*, std::vector<Entry*>> by_storage;
    const auto key = [](const Entry& e) { return e.handle.storage().unsafeGetStorageImpl(); };
    for (Entry& e : entries) {
      if (!e.exp_avg.defined() && has_kernel_dtype(e.handle.scalar_type())) by_storage[key(e)].push_back(&e);
    }
    for (const Update& u : updates) {
      if (missing(u)) state_bytes += allocate_state(by_storage.at(key(*u.entry)));
    }
  }
};

AdamW::AdamW(const torch::nn::Module& model, AdamWOptions options)
    : impl_(std::make_unique<Impl>(collect_params(model))) {
  check_options(options);
  impl_->options = options;
}
AdamW::~AdamW() = default;

void AdamW::step(double grad_scale) {
  const trace::Scope scope(trace::Kind::Optimizer, "AdamW");
  const at::NoGradGuard no_grad;
  const std::vector<Update> updates = impl_->checked_updates();
  impl_->allocate_missing(updates);
  std::vector<FlatRange> ranges;
  for (const Update& update : updates) {
    ++update.entry->step;
    ranges.push_back(range_of(update));
  }
  for (const FlatRange& run : join_neighbours(std::move(ranges), kMaxGapBytes)) launch(run, impl_->options, grad_scale);
  for (const Update& update : updates) bump_version(update.entry->handle);
}

void AdamW::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (Entry& e : impl_->entries) {
    at::Tensor& grad = e.handle.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad = at::Tensor();
    } else {
      grad.zero_();
    }
  }
}

void AdamW::set_lr(double lr) noexcept { impl_->options.lr = lr; }
double AdamW::lr() const noexcept { return impl_->options.lr; }

AdamW::ParamState AdamW::state(const at::Tensor& parameter) const {
  for (const Entry& e : impl_->entries) {
    if (!e.handle.is_same(parameter)) continue;
    if (e.step == 0) return {};
    return {e.exp_avg, e.exp_avg_sq, e.step};
  }
  fail<UsageError>("AdamW::state: expected one of this optimizer's parameters, got another tensor");
}

int64_t AdamW::state_bytes() const noexcept { return impl_->state_bytes; }

}  // namespace fsdpp::optim

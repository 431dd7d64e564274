#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/enforce.h"
#include "base/fnv.h"
#include "engine/init_fill.h"
#include "engine/registry.h"
#include "engine/unit.h"
#include "engine/use_guard.h"
#include "fsdpp/api/deferred_init.h"

namespace fsdpp {
namespace {

using engine::InitSnapshot;
using engine::InitStep;
using engine::Unit;

InitSnapshot lone_step(const at::Tensor& local, int64_t numel, InitStep::Kind kind, double a, double b) {
  InitStep step;
  step.kind = kind, step.a = a, step.b = b, step.region.numel = numel, step.dtype = local.scalar_type();
  return {{std::move(step)}, local.scalar_type(), {numel}, {1}, 0};
}

}  // namespace

// One call of materialize().
class Materializer {
 public:
  Materializer(torch::nn::Module& module, const MaterializeOptions& options);
  void check() const;
  void run();

 private:
  // Where a tensor lies: tied tensors lie in one place.
  using Place = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  struct Plain {
    std::string name;
    at::Tensor handle;
    Place place;
    bool is_buffer;
  };
  [[nodiscard]] static Place place_of(const at::Tensor& t) {
    return {t.storage().unsafeGetStorageImpl(), t.storage_offset(), t.sizes().vec(), t.strides().vec()};
  }
  void collect(const torch::OrderedDict<std::string, at::Tensor>& named, bool are_buffers);
  [[nodiscard]] std::string name_of(const at::Tensor& original, const std::string& otherwise) const;
  void check_recorded(const std::string& name, const at::Tensor& original, bool sharded) const;
  void fill(const std::string& name, const at::Tensor& original, const at::Tensor& local, shard::Range range, bool is_buffer, bool sharded) const;
  [[nodiscard]] at::Tensor make(const Plain& plain) const;

  const MaterializeOptions& options_;
  c10::Device device_ = c10::kCPU;
  std::vector<std::shared_ptr<Unit>> units_;
  std::vector<Plain> plain_;
  std::map<Place, std::string> names_;  ///< the first name of what lies there
};

Materializer::Materializer(torch::nn::Module& module, const MaterializeOptions& options) : options_(options) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals;
  std::unordered_set<const Unit*> seen;
  auto add_unit = [&](const torch::nn::Module& m) {
    auto unit = engine::find_unit(&m);
    if (!unit || !seen.insert(unit.get()).second) return;
    device_ = unit->context().mesh().device();
    if (!unit->deferred()) return;
    for (auto& b : unit->buffers())
      for (auto& p : b->params())
        if (p.on_meta.defined()) originals.emplace(p.handle().unsafeGetTensorImpl(), p.on_meta);
    units_.push_back(std::move(unit));
  };
  add_unit(module);
  for (auto& m : module.modules(/*include_self=*/false)) add_unit(*m);
  device_ = options.device.value_or(device_);
  const auto parameters = module.named_parameters(true);
  for (auto& p : parameters)
    if (auto found = originals.find(p.value().unsafeGetTensorImpl()); found != originals.end()) names_.emplace(place_of(found->second), p.key());
  collect(parameters, false);
  collect(module.named_buffers(true), true);
}

std::string Materializer::name_of(const at::Tensor& original, const std::string& otherwise) const {
  const auto found = names_.find(place_of(original));
  return found == names_.end() ? otherwise : found->second;
}

void Materializer::collect(const torch::OrderedDict<std::string, at::Tensor>& named, bool are_buffers) {
  for (auto& item : named) {
    const auto& t = item.value();
    if (!t.defined() || !t.is_meta() || engine::find_unit(t)) continue;
    const auto name = names_.emplace(place_of(t), item.key()).first->second;
    plain_.push_back({name, t, place_of(t), are_buffers});
  }
}

void Materializer::check_recorded(const std::string& name, const at::Tensor& original, bool sharded) const {
  FSDPP_ENFORCE(engine::recorded_steps(original), UsageError,
                "materialize: '{}' is on the meta device, but not by fsdpp::DeferredInit, so its value is not known. Try: build the "
                "module while a DeferredInit is alive, or fill it in MaterializeOptions::init.", name);
  const auto snapshot = engine::snapshot_of(original);
  const auto obstacle = engine::obstacle(snapshot);
  FSDPP_ENFORCE(!obstacle, UsageError,
                "materialize: the value of '{}' comes from {}, which deferred initialisation can't repeat for a part of it. Try: fill "
                "it in MaterializeOptions::init.", name, *obstacle);
  for (auto& step : snapshot.steps)
    FSDPP_ENFORCE(!sharded || step.kind != InitStep::Kind::Replay || step.region.numel * original.element_size() <= engine::kStagingBytes,
                  UsageError, "materialize: '{}' is sharded, but its value comes from {}, which can only be run for all of its {} elements. "
                  "Try: fill it in MaterializeOptions::init.", name, step.op, step.region.numel);
}

void Materializer::check() const {
  if (options_.init || !options_.fill) return;
  for (auto& unit : units_)
    for (auto& b : unit->buffers())
      for (auto& p : b->params())
        if (p.on_meta.defined()) check_recorded(name_of(p.on_meta, p.name), p.on_meta, true);
  for (auto& p : plain_) check_recorded(p.name, p.handle, false);
}

void Materializer::fill(const std::string& name, const at::Tensor& original, const at::Tensor& local, shard::Range range, bool is_buffer,
                        bool sharded) const {
  InitTarget target;
  target.name = name;
  target.global_sizes = original.sizes().vec();
  target.elements = range;
  target.local = local;
  target.seed_ = options_.seed;
  target.stream_ = fnv1a(target.name);
  if (options_.init && options_.init(target.name, target)) return;
  if (!options_.fill) {
    const bool known = is_buffer && engine::recorded_steps(original) && !engine::obstacle(engine::snapshot_of(original));
    if (!known) return;
  } else {
    check_recorded(target.name, original, sharded);
  }
  engine::InitValues(engine::snapshot_of(original), {target.seed_, target.stream_}).fill(local, range);
}

// A dense tensor of the same shape and strides.
at::Tensor Materializer::make(const Plain& plain) const {
  const auto& t = plain.handle;
  const auto options = at::TensorOptions(device_).dtype(t.scalar_type());
  auto row_major = at::zeros(t.sizes(), options);
  fill(plain.name, t, row_major, {0, t.numel()}, plain.is_buffer, false);
  if (t.is_contiguous() || !t.is_non_overlapping_and_dense()) return row_major;
  return at::empty_strided(t.sizes(), t.strides(), options).copy_(row_major);
}

void Materializer::run() {
  const at::NoGradGuard no_grad;
  for (auto& unit : units_)
    unit->materialize([&](const engine::ParamState& param, shard::Range range, const at::Tensor& local) {
      fill(name_of(param.on_meta, param.name), param.on_meta, local, range, false, true);
    });
  std::map<Place, at::Tensor> made;
  for (auto& plain : plain_) {
    auto& value = made[plain.place];
    if (!value.defined()) value = make(plain);
    engine::point_handle(plain.handle, value);
    torch::autograd::impl::set_grad_accumulator(plain.handle, {});
  }
}

void InitTarget::uniform(double low, double high) {
  engine::InitValues(lone_step(local, elements.end, InitStep::Kind::Uniform, low, high), {seed_, stream_}).fill(local, elements);
}

void InitTarget::normal(double mean, double deviation) {
  engine::InitValues(lone_step(local, elements.end, InitStep::Kind::Normal, mean, deviation), {seed_, stream_}).fill(local, elements);
}

void InitTarget::constant(double value) {
  engine::InitValues(lone_step(local, elements.end, InitStep::Kind::Constant, value, 0), {seed_, stream_}).fill(local, elements);
}

void materialize(torch::nn::Module& module, const MaterializeOptions& options) {
  const DeferredInit::Pause pause;
  Materializer materializer(module, options);
  materializer.check();
  materializer.run();
}

}  // namespace fsdpp

#include "fsdpp/optim/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <unordered_set>

#include "base/enforce.h"
#include "fsdpp/optim/optimizer.h"
#include "optim/grad_groups.h"

namespace fsdpp::optim {
namespace {

constexpr const char* kScaler = "GradScaler";

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) { return optimizer.parameters(); }
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> params;
  for (const auto& group : optimizer.param_groups())
    params.insert(params.end(), group.params().begin(), group.params().end());
  return params;
}
std::vector<at::Tensor> parameters_of(const torch::nn::Module& model) { return model.parameters(/*recurse=*/true); }

void check_options(const GradScalerOptions& o) {
  FSDPP_ENFORCE(o.init_scale > 0 && std::isfinite(o.init_scale) && o.growth_factor > 1 && o.backoff_factor > 0 &&
                    o.backoff_factor < 1 && o.growth_interval > 0,
                ConfigError,
                "{}: expected init_scale > 0, growth_factor > 1, backoff_factor in (0, 1) and growth_interval > 0, got "
                "{}, {}, {}, {}",
                kScaler, o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval);
}

void check_scale(double scale) {
  FSDPP_ENFORCE(scale > 0 && std::isfinite(static_cast<float>(scale)), ConfigError,
                "{}: expected a positive scale that is finite in fp32, got {}", kScaler, scale);
}

void check_not_half(const std::vector<GradGroup>& groups) {
  for (const GradGroup& group : groups) {
    for (const at::Tensor& grad : group.grads)
      FSDPP_ENFORCE(grad.scalar_type() != c10::kHalf, UsageError,
                    "{}: expected gradients of a wider dtype, got float16, in which unscaling loses small ones. Try: "
                    "float32 parameters and MixedPrecisionPolicy::param_dtype",
                    kScaler);
  }
}

/// Parameters that were unscaled together in this iteration.
struct Unscaled {
  std::unordered_set<const c10::TensorImpl*> params;
  bool finite = true;
};

}  // namespace

struct GradScaler::Impl {
  GradScalerOptions options;
  float scale;
  int64_t growth_tracker = 0;
  std::vector<Unscaled> unscaled;    // since the last update()
  std::vector<const void*> stepped;  // optimizers, since the last update()

  explicit Impl(const GradScalerOptions& o) : options(o), scale(static_cast<float>(o.init_scale)) { check_options(o); }

  [[nodiscard]] bool is_unscaled(const at::Tensor& param) const {
    return std::any_of(unscaled.begin(), unscaled.end(),
                       [&](const Unscaled& u) { return u.params.contains(param.unsafeGetTensorImpl()); });
  }

  void unscale(const std::vector<at::Tensor>& params) {
    const at::NoGradGuard no_grad;
    const std::vector<GradGroup> groups = group_gradients(kScaler, collect_params(params));
    check_not_half(groups);
    Unscaled result;
    for (const at::Tensor& param : params) result.params.insert(param.unsafeGetTensorImpl());
    result.finite = all_finite(groups);
    scale_all(groups, static_cast<float>(1.0 / scale));
    unscaled.push_back(std::move(result));
  }

  void unscale_all_once(const std::vector<at::Tensor>& params) {
    if (!options.enabled) return;
    for (const at::Tensor& param : params)
      FSDPP_ENFORCE(!is_unscaled(param), UsageError,
                    "{}: unscale_() expected gradients that are still scaled, got some that were unscaled already "
                    "since the last update()",
                    kScaler);
    unscale(params);
  }

  /// Whether everything that was unscaled together with one of `params` is finite.
  [[nodiscard]] bool is_finite(const std::vector<at::Tensor>& params) const {
    return std::all_of(unscaled.begin(), unscaled.end(), [&](const Unscaled& u) {
      return u.finite || std::none_of(params.begin(), params.end(),
                                      [&](const at::Tensor& p) { return u.params.contains(p.unsafeGetTensorImpl()); });
    });
  }

  bool step(const void* optimizer, std::vector<at::Tensor> params, const std::function<void()>& step) {
    if (!options.enabled) {
      step();
      return true;
    }
    FSDPP_ENFORCE(std::find(stepped.begin(), stepped.end(), optimizer) == stepped.end(), UsageError,
                  "{}: step() has already been called for this optimizer since the last update()", kScaler);
    std::vector<at::Tensor> scaled;
    for (const at::Tensor& param : params) {
      if (!is_unscaled(param)) scaled.push_back(param);
    }
    if (!scaled.empty()) unscale(scaled);
    stepped.push_back(optimizer);
    if (!is_finite(params)) return false;
    step();
    return true;
  }

  void begin_iteration() {
    unscaled.clear();
    stepped.clear();
  }
};

GradScaler::GradScaler(GradScalerOptions options) : impl_(std::make_unique<Impl>(options)) {}
GradScaler::~GradScaler() = default;

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return enabled() ? at::mul(loss, at::scalar_tensor(impl_->scale, at::kFloat)) : loss;
}

void GradScaler::unscale_(const torch::nn::Module& model) { impl_->unscale_all_once(parameters_of(model)); }
void GradScaler::unscale_(const Optimizer& optimizer) { impl_->unscale_all_once(parameters_of(optimizer)); }
void GradScaler::unscale_(const torch::optim::Optimizer& optimizer) {
  impl_->unscale_all_once(parameters_of(optimizer));
}

bool GradScaler::step(Optimizer& optimizer) {
  return impl_->step(&optimizer, parameters_of(optimizer), [&] { optimizer.step(); });
}
bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  return impl_->step(&optimizer, parameters_of(optimizer), [&] { optimizer.step(); });
}

void GradScaler::update() {
  if (!enabled()) return;
  Impl& s = *impl_;
  FSDPP_ENFORCE(!s.unscaled.empty(), UsageError, "{}: update() expected a step() or unscale_() before it, got none",
                kScaler);
  const bool finite = std::all_of(s.unscaled.begin(), s.unscaled.end(), [](const Unscaled& u) { return u.finite; });
  s.begin_iteration();
  if (!finite) {
    s.scale = static_cast<float>(s.scale * s.options.backoff_factor);
    s.growth_tracker = 0;
  } else if (++s.growth_tracker == s.options.growth_interval) {
    const auto grown = static_cast<float>(s.scale * s.options.growth_factor);
    if (std::isfinite(grown)) s.scale = grown;
    s.growth_tracker = 0;
  }
}

void GradScaler::update(double new_scale) {
  if (!enabled()) return;
  check_scale(new_scale);
  impl_->scale = static_cast<float>(new_scale);
  impl_->begin_iteration();
}

double GradScaler::scale() const noexcept { return enabled() ? impl_->scale : 1.0; }
bool GradScaler::enabled() const noexcept { return impl_->options.enabled; }

GradScaler::State GradScaler::state() const noexcept { return {impl_->scale, impl_->growth_tracker}; }

void GradScaler::set_state(const State& state) {
  check_scale(state.scale);
  FSDPP_ENFORCE(state.growth_tracker >= 0, ConfigError, "{}: expected a growth tracker >= 0, got {}", kScaler,
                state.growth_tracker);
  impl_->scale = static_cast<float>(state.scale);
  impl_->growth_tracker = state.growth_tracker;
}

}  // namespace fsdpp::optim

#include "fsdpp/optim/adamw.h"

#include "optim/flat_optimizer.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

class FlatAdamW final : public GroupedOptimizer<AdamWOptions> {
 public:
  FlatAdamW() : GroupedOptimizer("AdamW") {}

 private:
  void check(const AdamWOptions& o) const override {
    FSDPP_ENFORCE(o.lr >= 0 && o.eps >= 0 && o.weight_decay >= 0, ConfigError,
                  "AdamW: expected lr, eps and weight_decay >= 0, got {}, {}, {}", o.lr, o.eps, o.weight_decay);
    FSDPP_ENFORCE(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, ConfigError,
                  "AdamW: expected betas in [0, 1), got {}, {}", o.beta1, o.beta2);
  }
  [[nodiscard]] size_t state_count(size_t group) const override { return options(group).amsgrad ? 3 : 2; }
  [[nodiscard]] int64_t phase(const Entry& entry) const override { return entry.step; }
  [[nodiscard]] bool writes_cast() const noexcept override { return true; }
  void update(const Run& run, cuda::StreamView stream) override {
    const kernels::AdamWArgs args = args_of(run);
    shard::run_kernel(
        "adamw", stream, [&](auto handle) { return kernels::adamw(args, handle); }, [&] { kernels::adamw_cpu(args); });
  }
  void write_numbers(const Run& run, void* out) const override { kernels::adamw_numbers(args_of(run), out); }

  [[nodiscard]] kernels::AdamWArgs args_of(const Run& run) const {
    const AdamWOptions& o = options(run.group);
    kernels::AdamWArgs args;
    args.numbers = run.numbers;
    args.param = run.param;
    args.param_dtype = run.param_dtype;
    args.grad = run.grad;
    args.grad_dtype = run.grad_dtype;
    args.exp_avg = run.state[0];
    args.exp_avg_sq = run.state[1];
    args.max_exp_avg_sq = run.state[2];
    args.cast = run.cast;
    args.cast_dtype = run.cast_dtype;
    args.numel = run.numel;
    args.lr = o.lr;
    args.beta1 = o.beta1;
    args.beta2 = o.beta2;
    args.eps = o.eps;
    args.weight_decay = o.weight_decay;
    args.step = run.phase;
    args.grad_scale = o.maximize ? -run.grad_scale : run.grad_scale;
    return args;
  }
};

FlatAdamW& core(FlatOptimizer& impl) { return static_cast<FlatAdamW&>(impl); }

}  // namespace

AdamW::AdamW(const torch::nn::Module& model, AdamWOptions options) : Optimizer(std::make_unique<FlatAdamW>()) {
  core(impl()).add_group(collect_params(model), options);
}

AdamW::AdamW(const std::vector<ParamGroup<AdamWOptions>>& groups) : Optimizer(std::make_unique<FlatAdamW>()) {
  for (const auto& group : groups) add_group(group.params, group.options);
}

void AdamW::add_group(const std::vector<at::Tensor>& params, const AdamWOptions& options) {
  core(impl()).add_group(collect_params(params), options);
}

const AdamWOptions& AdamW::options(size_t group) const { return core(impl()).options(group); }

AdamW::ParamState AdamW::state(const at::Tensor& parameter) const {
  const Entry& e = impl().entry_of(parameter);
  if (e.step == 0) return {};
  return {e.state[0], e.state[1], e.state[2], e.step};
}

}  // namespace fsdpp::optim

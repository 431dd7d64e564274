#include "fsdpp/optim/sgd.h"

#include "optim/flat_optimizer.h"
#include "shard/kernel_call.h"

namespace fsdpp::optim {
namespace {

constexpr int64_t kFirst = 1;
constexpr int64_t kLater = 2;

class FlatSGD final : public GroupedOptimizer<SGDOptions> {
 public:
  FlatSGD() : GroupedOptimizer("SGD") {}

 private:
  void check(const SGDOptions& o) const override {
    FSDPP_ENFORCE(o.lr >= 0 && o.momentum >= 0 && o.weight_decay >= 0, ConfigError,
                  "SGD: expected lr, momentum and weight_decay >= 0, got {}, {}, {}", o.lr, o.momentum, o.weight_decay);
    FSDPP_ENFORCE(!o.nesterov || (o.momentum > 0 && o.dampening == 0), ConfigError,
                  "SGD: nesterov expected a momentum > 0 and no dampening, got {} and {}", o.momentum, o.dampening);
  }
  [[nodiscard]] size_t state_count(size_t group) const override { return options(group).momentum > 0 ? 1 : 0; }
  [[nodiscard]] int64_t phase(const Entry& entry) const override {
    return entry.step == 1 && state_count(entry.group) > 0 ? kFirst : kLater;
  }
  void update(const Run& run, cuda::StreamView stream) override {
    const kernels::SGDArgs args = args_of(run);
    shard::run_kernel(
        "sgd", stream, [&](auto handle) { return kernels::sgd(args, handle); }, [&] { kernels::sgd_cpu(args); });
  }
  void write_numbers(const Run& run, void* out) const override { kernels::sgd_numbers(args_of(run), out); }

  [[nodiscard]] kernels::SGDArgs args_of(const Run& run) const {
    const SGDOptions& o = options(run.group);
    kernels::SGDArgs args;
    args.numbers = run.numbers;
    args.param = run.param;
    args.param_dtype = run.param_dtype;
    args.grad = run.grad;
    args.grad_dtype = run.grad_dtype;
    args.momentum_buffer = run.state[0];
    args.numel = run.numel;
    args.lr = o.lr;
    args.momentum = o.momentum;
    args.dampening = o.dampening;
    args.weight_decay = o.weight_decay;
    args.nesterov = o.nesterov;
    args.first = run.phase == kFirst;
    args.grad_scale = o.maximize ? -run.grad_scale : run.grad_scale;
    return args;
  }
};

FlatSGD& core(FlatOptimizer& impl) { return static_cast<FlatSGD&>(impl); }

}  // namespace

SGD::SGD(const torch::nn::Module& model, SGDOptions options) : Optimizer(std::make_unique<FlatSGD>()) {
  core(impl()).add_group(collect_params(model), options);
}

SGD::SGD(const std::vector<ParamGroup<SGDOptions>>& groups) : Optimizer(std::make_unique<FlatSGD>()) {
  for (const auto& group : groups) add_group(group.params, group.options);
}

void SGD::add_group(const std::vector<at::Tensor>& params, const SGDOptions& options) {
  core(impl()).add_group(collect_params(params), options);
}

const SGDOptions& SGD::options(size_t group) const { return core(impl()).options(group); }

at::Tensor SGD::momentum_buffer(const at::Tensor& parameter) const {
  const Entry& e = impl().entry_of(parameter);
  return e.step == 0 ? at::Tensor() : e.state[0];
}

}  // namespace fsdpp::optim

#include "unit/fsdp2_suite/support.h"

#include <torch/optim/adam.h>

namespace fsdpp::test::suite {
namespace {

struct Comparison {
  SlowWorld& world;
  const Trainee &sharded, &plain;
  const Inputs& inputs;
  const ParityOptions& options;
  std::vector<std::pair<at::Tensor, at::Tensor>> losses;  // got, wanted; looked at in the end: no waiting for the device

  void sleep(double milliseconds) const {
    if (milliseconds > 0) cuda::current_stream(world.device()).sleep(milliseconds);
  }

  at::Tensor plain_backward(int iteration, int micro_batch) const {
    at::Tensor own;
    for (int r = 0; r < world.size(); ++r) {
      auto loss = plain.loss(inputs(micro_batch, r), iteration);
      (loss / world.size()).backward();
      if (r == world.rank()) own = loss.detach();
    }
    return own;
  }

  at::Tensor sharded_backward(int iteration, int micro_batch) const {
    if (options.unshard_async)
      for (auto& u : units(*sharded.module)) u.unshard(/*async=*/true);
    auto loss = sharded.loss(inputs(micro_batch, world.rank()), iteration);
    sleep(options.delay_after_forward);
    loss.backward();
    return loss.detach();
  }

  void iterate(int iteration) {
    for (int k = 0; k < options.micro_batches; ++k) {
      options.before_micro_batch(k);
      int micro_batch = iteration * options.micro_batches + k;
      auto want = plain_backward(iteration, micro_batch);
      losses.emplace_back(sharded_backward(iteration, micro_batch), want);
    }
    options.after_backwards();
    sleep(options.delay_before_optim);
  }
};

// With eps 1e-8 a first step goes by the sign of a gradient alone, however near zero: rounding would become visible.
torch::optim::Adam adam(const Trainee& trainee, double lr) {
  return torch::optim::Adam(trainee.module->parameters(), torch::optim::AdamOptions(lr).eps(1e-3));
}

}  // namespace

void expect_train_parity(SlowWorld& world, const Trainee& sharded, const Trainee& plain, const Inputs& inputs,
                         const ParityOptions& options) {
  Comparison comparison{world, sharded, plain, inputs, options, {}};
  auto plain_adam = adam(plain, options.lr), sharded_adam = adam(sharded, options.lr);
  for (int i = 0; i < options.iterations; ++i) {
    for (auto* o : {&plain_adam, &sharded_adam}) o->zero_grad(/*set_to_none=*/i % 2 == 0);
    comparison.iterate(i);
    for (auto* o : {&plain_adam, &sharded_adam}) o->step();
    options.after_step();
    if (options.sharded_after_step) expect_sharded(*sharded.module);
  }
  double tolerance = options.tolerance.value_or(world.device().is_cuda() ? 1e-5 : 1e-6);
  for (size_t i = 0; i < comparison.losses.size(); ++i)
    EXPECT_LE(relative_error(comparison.losses[i].first, comparison.losses[i].second), tolerance) << "loss " << i;
  expect_same_parameters(*sharded.module, *plain.module, tolerance, 5 * tolerance);
}

}  // namespace fsdpp::test::suite

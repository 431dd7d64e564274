#include "unit/fsdp2_suite/support.h"

#include <torch/optim/adam.h>

namespace fsdpp::test::suite {
namespace {

at::Tensor plain_backward(const Trainee& plain, const Inputs& inputs, int iteration, const World& world) {
  at::Tensor own;
  for (int r = 0; r < world.size(); ++r) {
    auto loss = plain.loss(inputs(iteration, r));
    (loss / world.size()).backward();
    if (r == world.rank()) own = loss.detach();
  }
  return own;
}

at::Tensor sharded_backward(const Trainee& sharded, const at::Tensor& input, const World& world, const ParityOptions& options) {
  auto sleep = [&](double ms) {
    if (ms > 0) cuda::current_stream(world.device()).sleep(ms);
  };
  if (options.unshard_async)
    for (auto& u : units(*sharded.module)) u.unshard(/*async=*/true);
  auto loss = sharded.loss(input);
  sleep(options.delay_after_forward);
  loss.backward();
  sleep(options.delay_before_optim);
  return loss.detach();
}

}  // namespace

void expect_train_parity(SlowWorld& world, const Trainee& sharded, const Trainee& plain, const Inputs& inputs, const ParityOptions& options) {
  torch::optim::Adam plain_adam(plain.module->parameters(), torch::optim::AdamOptions(options.lr));
  torch::optim::Adam sharded_adam(sharded.module->parameters(), torch::optim::AdamOptions(options.lr));
  std::vector<std::pair<at::Tensor, at::Tensor>> losses;  // compared at the end: no waiting for the device in between
  for (int i = 0; i < options.iterations; ++i) {
    for (auto* adam : {&plain_adam, &sharded_adam}) adam->zero_grad(/*set_to_none=*/i % 2 == 0);
    auto want = plain_backward(plain, inputs, i, world);
    losses.emplace_back(sharded_backward(sharded, inputs(i, world.rank()), world, options), want);
    for (auto* adam : {&plain_adam, &sharded_adam}) adam->step();
    options.after_step();
    expect_sharded(*sharded.module);
  }
  for (size_t i = 0; i < losses.size(); ++i)
    EXPECT_LE(relative_error(losses[i].first, losses[i].second), options.tolerance) << "loss of iteration " << i;
  expect_same_parameters(*sharded.module, *plain.module, /*gradients=*/true, options.tolerance);
}

}  // namespace fsdpp::test::suite

// Parameters and gradients in the host's memory, over real processes; with FSDPP_TEST_DEVICE=cuda on GPUs with NCCL.
#include <gtest/gtest.h>

#include "base/env.h"
#include "fsdpp/optim/adamw.h"
#include "support/slow_world.h"
#include "support/tiny_models.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

bool on_cuda() { return env::get("FSDPP_TEST_DEVICE").value_or("cpu") == "cuda"; }

SlowWorld& world() {
  static auto* instance = [] {
    comm::WorldOptions options;
    options.device = on_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    return new std::shared_ptr<SlowWorld>(std::make_shared<SlowWorld>(comm::World::init(options)));
  }();
  return **instance;
}

std::shared_ptr<comm::Mesh> make_mesh(int replicas, const std::string& name) {
  return comm::Mesh::hybrid(std::shared_ptr<comm::World>(&world(), [](auto*) {}), replicas, name);
}

class Offload : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(expect_started_world_size(world()));
    ASSERT_EQ(world().device().is_cuda(), on_cuda());
    world().delays = {};
  }
};

struct SquareImpl : torch::nn::Module {
  explicit SquareImpl(int64_t n) { w = register_parameter("w", at::zeros({n, n})); }
  at::Tensor forward() {
    auto churn = at::empty({w.numel()}, w.options());  // memory of the size of the gradient, taken and given back
    churn.fill_(-1.0);
    return w.sum();
  }
  at::Tensor w;
};
FSDPP_MODULE(Square);

struct TwoImpl : torch::nn::Module {
  explicit TwoImpl(int64_t n) : first(n), second(n) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward() { return first() + 2.0 * second(); }
  Square first, second;
};
FSDPP_MODULE(Two);

// Gradients read on the host as soon as backward returns must be those of this very iteration.
void expect_gradients_of_each_iteration(Two& two, int iterations) {
  double ranks = world().size(), mean = (ranks + 1) / 2;
  for (int k = 1; k <= iterations; ++k) {
    (two() * static_cast<double>(k * (world().rank() + 1))).backward();
    for (auto [p, factor] : {std::pair{two->first->w, 1.0}, {two->second->w, 2.0}}) {
      ASSERT_TRUE(p.grad().device().is_cpu());
      auto wrong = (p.grad() != factor * mean * k).sum().item<int64_t>();
      ASSERT_EQ(wrong, 0) << "iteration " << k << " of " << iterations;
      p.grad().zero_();
    }
  }
}

TEST_F(Offload, PB25_GradientsOnTheHostAreThoseOfTheirIteration) {
  int64_t n = on_cuda() ? 1024 : 128;
  int replicas = world().size() == 4 ? 2 : 1;
  for (double delay : {0.0, on_cuda() ? 5.0 : 1.0}) {
    Two two(n);
    two->to(world().device());
    auto mesh = make_mesh(replicas, "pb25." + std::to_string(static_cast<int>(delay)));
    FullyShardOptions options;
    options.offload_policy.emplace();
    for (auto& square : {two->first, two->second}) fully_shard(square, mesh, options);
    fully_shard(two, mesh, options);
    world().delays.reduce = delay;
    expect_gradients_of_each_iteration(two, delay > 0 ? 10 : 50);
    world().delays = {};
  }
}

// Three steps with and without offload, from the same weights, with a sleep before each gather: the optimizer on the host must not
// write a shard that is still being copied to the device.
TEST_F(Offload, TrainsLikeTheModelOnTheDevice) {
  for (bool params : {true, false}) {
    std::vector<at::Tensor> results[2];
    for (bool offload : {false, true}) {
      auto net = make_tiny_net(1, 3, 23, 16);
      net->to(world().device());
      FullyShardOptions options;
      if (offload) options.offload_policy = CPUOffloadPolicy{.params = params, .gradients = true};
      auto name = "train." + std::to_string(params) + std::to_string(offload);
      shard_tiny_net(net, make_mesh(1, name), options, options);
      optim::AdamW adam(*net, {.lr = 0.01, .eps = 1e-3});
      world().delays.gather = offload ? 3.0 : 0.0;
      for (int step = 0; step < 3; ++step) {
        auto ids = tokens(10 * step + world().rank()).to(world().device());
        token_loss(net(ids), ids).backward();
        for (auto& p : net->parameters()) EXPECT_EQ(p.device().is_cpu(), (offload && params) || !on_cuda());
        adam.step();
        adam.zero_grad();
      }
      world().delays = {};
      for (auto& p : net->parameters()) results[offload].push_back(full_tensor(p).cpu());
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_LT(relative_error(results[1][i], results[0][i]), 1e-6) << i;
  }
}

}  // namespace
}  // namespace fsdpp::test

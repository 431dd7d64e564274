// Whole training steps in a CUDA graph, over real processes: with FSDPP_TEST_DEVICE=cuda on GPUs with NCCL. On the CPU a StepGraph runs
// its step as usual, and these are tests of that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/env.h"
#include "fsdpp/api/step_graph.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "fsdpp/optim/sgd.h"
#include "support/slow_world.h"
#include "support/tiny_models.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

using ::testing::HasSubstr;

bool on_cuda() { return env::get("FSDPP_TEST_DEVICE").value_or("cpu") == "cuda"; }

SlowWorld& world() {
  static auto* instance = [] {
    comm::WorldOptions options;
    options.device = on_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    return new std::shared_ptr<SlowWorld>(std::make_shared<SlowWorld>(comm::World::init(options)));
  }();
  return **instance;
}

std::shared_ptr<comm::Mesh> make_mesh(int replicas = 1) {
  static int made = 0;
  return comm::Mesh::hybrid(std::shared_ptr<comm::World>(&world(), [](auto*) {}), replicas, "graph." + std::to_string(made++));
}

class Graph : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(expect_started_world_size(world()));
    ASSERT_EQ(world().device().is_cuda(), on_cuda());
  }
};

struct How {
  int micro_batches = 1, replicas = 1, reduce_buffers = 1;
  bool casts = false, keep_cast = false, in_backward = false, clips = false, sgd = false;
};
std::ostream& operator<<(std::ostream& out, const How& h) {
  return out << h.micro_batches << " micro-batches, " << h.replicas << " replicas, buffers " << h.reduce_buffers << ", casts " << h.casts << h.keep_cast
             << ", step in backward " << h.in_backward << ", clips " << h.clips << ", sgd " << h.sgd;
}

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;
};

std::unique_ptr<optim::Optimizer> make_optimizer(const TinyNet& net, const How& how) {
  if (how.sgd) return std::make_unique<optim::SGD>(*net, optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
  return std::make_unique<optim::AdamW>(*net, optim::AdamWOptions{.lr = 0.01, .eps = 1e-3});
}

constexpr int kSteps = 20;

Result trained(const How& how, bool with_graph) {
  auto net = make_tiny_net(1, 3, 23, 16);
  net->to(world().device());
  FullyShardOptions options;
  if (how.casts) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  options.keep_cast_shard = how.keep_cast;
  shard_tiny_net(net, make_mesh(how.replicas), options, options);
  unit_of(*net).set_reduce_scatter_max_input_buffers(how.reduce_buffers);
  auto optimizer = make_optimizer(net, how);
  if (how.in_backward) optimizer->step_in_backward(*net);
  std::vector<at::Tensor> ids(static_cast<size_t>(how.micro_batches));
  for (auto& t : ids) t = tokens(0).to(world().device());
  auto step = [&] {
    optimizer->zero_grad();
    auto sum = at::zeros({}, at::TensorOptions(world().device()));
    for (int micro = 0; micro < how.micro_batches; ++micro) {
      unit_of(*net).set_requires_gradient_sync(micro + 1 == how.micro_batches);
      auto loss = token_loss(net(ids[static_cast<size_t>(micro)]), ids[static_cast<size_t>(micro)]);
      loss.backward();
      sum.add_(loss.detach());
    }
    if (how.clips) (void)optim::clip_grad_norm_on_device_(*net, 0.1);
    optimizer->step();
    return sum;
  };
  Result result;
  StepGraph graph(*net, step);
  for (int i = 0; i < kSteps; ++i) {
    for (int micro = 0; micro < how.micro_batches; ++micro)
      ids[static_cast<size_t>(micro)].copy_(tokens(100 * i + 10 * micro + world().rank()));
    optimizer->set_lr(0.01 / (1 + i));
    result.losses.push_back((with_graph ? graph() : step()).item<double>());
  }
  EXPECT_EQ(graph.captured(), with_graph && on_cuda());
  for (auto& p : net->parameters()) result.parameters.push_back(full_tensor(p));
  return result;
}

void expect_same_bits(const How& how) {
  SCOPED_TRACE(::testing::PrintToString(how));
  const auto want = trained(how, false), got = trained(how, true);
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_NE(want.losses.front(), want.losses.back());
  for (size_t i = 0; i < want.parameters.size(); ++i) EXPECT_TRUE(at::equal(got.parameters[i], want.parameters[i])) << "parameter " << i;
}

TEST_F(Graph, OfAStepGivesItsBitsOverTwentySteps) { expect_same_bits({}); }
TEST_F(Graph, WithAccumulationGivesTheBits) { expect_same_bits({.micro_batches = 3}); }
TEST_F(Graph, WithCastsAndClippingGivesTheBits) { expect_same_bits({.reduce_buffers = 2, .casts = true, .clips = true}); }
TEST_F(Graph, WithKeptCastShardsAndAStepInBackwardGivesTheBits) {
  expect_same_bits({.reduce_buffers = 2, .casts = true, .keep_cast = true, .in_backward = true});
}
TEST_F(Graph, WithMomentumGivesTheBits) { expect_same_bits({.sgd = true}); }
TEST_F(Graph, OnReplicasGivesTheBits) {
  if (world().size() % 2 != 0) return;
  expect_same_bits({.replicas = 2, .casts = true});
}

// A step that reads a value of the GPU: said so, and training goes on without a graph.
TEST_F(Graph, OfAStepThatWaitsForTheDeviceThenUsageError) {
  auto net = make_tiny_net(1, 2, 23, 16);
  net->to(world().device());
  shard_tiny_net(net, make_mesh());
  optim::AdamW adam(*net);
  const auto ids = tokens(world().rank()).to(world().device());
  double seen = 0;
  auto step = [&] {
    adam.zero_grad();
    auto loss = token_loss(net(ids), ids);
    loss.backward();
    seen = loss.item<double>();
    adam.step();
    return loss.detach();
  };
  StepGraph graph(*net, step, {.eager_steps = 2});
  for (int i = 0; i < 2; ++i) (void)graph();
  if (on_cuda()) {
    try {
      (void)graph();
      ADD_FAILURE() << "captured";
    } catch (const UsageError& e) {
      EXPECT_THAT(e.what(), HasSubstr("must not wait for the GPU"));
    }
    EXPECT_FALSE(graph.captured());
  }
  const double before = seen;
  (void)step();
  EXPECT_LT(seen, before) << "training goes on";
  EXPECT_TRUE(std::isfinite(seen));
}

TEST_F(Graph, OfAFirstStepOfTheOptimizerThenUsageError) {
  if (!on_cuda()) return;
  auto net = make_tiny_net(1, 2, 23, 16);
  net->to(world().device());
  shard_tiny_net(net, make_mesh());
  const auto ids = tokens(world().rank()).to(world().device());
  std::unique_ptr<optim::AdamW> adam;
  auto step = [&] {
    auto loss = token_loss(net(ids), ids);
    loss.backward();
    if (adam) adam->step();
    return loss.detach();
  };
  StepGraph graph(*net, step, {.eager_steps = 2});
  for (int i = 0; i < 2; ++i) (void)graph();
  adam = std::make_unique<optim::AdamW>(*net);
  try {
    (void)graph();
    ADD_FAILURE() << "captured";
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("some steps without the graph first"));
  }
}

}  // namespace
}  // namespace fsdpp::test

// Sharded training over real processes, on the CPU or, with FSDPP_TEST_DEVICE=cuda, on GPUs with NCCL. Every rank also trains
// the plain model on all ranks' batches and compares.
#include <gtest/gtest.h>

#include <functional>

#include "base/env.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "support/slow_world.h"
#include "support/tiny_models.h"
#include "support/world_size.h"

namespace fsdpp::test {
namespace {

constexpr int kSteps = 4;
constexpr double kLearningRate = 1e-2;

bool on_cuda() { return env::get("FSDPP_TEST_DEVICE").value_or("cpu") == "cuda"; }

SlowWorld& world() {
  static auto* instance = [] {
    comm::WorldOptions options;
    options.device = on_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    return new std::shared_ptr<SlowWorld>(std::make_shared<SlowWorld>(comm::World::init(options)));
  }();
  return **instance;
}

std::shared_ptr<comm::Mesh> mesh() {
  static auto* instance =
      new std::shared_ptr<comm::Mesh>(comm::Mesh::shard(std::shared_ptr<comm::World>(&world(), [](auto*) {}), "training"));
  return *instance;
}

class Dist : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(expect_started_world_size(world()));
    ASSERT_EQ(world().device().is_cuda(), on_cuda());
    world().delays = {};
  }
  static at::Tensor ids(int step, int rank) { return tokens(100 * step + rank).to(world().device()); }
  static TinyNet net_on_device() {
    auto net = make_tiny_net();
    net->to(world().device());
    return net;
  }
};

struct Result {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
};

// `before_step` runs between backward and the optimizer.
Result train(TinyNet net, bool sharded, double clip, const std::function<void()>& before_step = [] {}) {
  optim::AdamW optimizer(*net, {.lr = kLearningRate});
  Result result;
  for (int s = 0; s < kSteps; ++s) {
    optimizer.zero_grad();
    at::Tensor loss;
    int first = sharded ? world().rank() : 0, last = sharded ? first + 1 : world().size();
    for (int r = first; r < last; ++r) {
      auto in = tokens(100 * s + r).to(world().device());
      auto part = token_loss(net(in), in.flip(0)) / (last - first);
      loss = loss.defined() ? loss + part : part;
    }
    loss.backward();
    before_step();
    result.norms.push_back(optim::clip_grad_norm_(*net, clip));
    optimizer.step();
    auto mean = loss.detach().clone();
    if (sharded) {
      auto stream = cuda::current_stream(world().device());
      comm::Buffer buffer{mean.mutable_data_ptr(), 1, c10::ScalarType::Float};
      mesh()->reduce_comm().all_reduce(buffer, buffer, comm::ReduceOp::Sum, stream, {}).wait(stream);
      mean /= world().size();
    }
    result.losses.push_back(mean.item<double>());
  }
  for (auto& p : net->parameters()) result.weights.push_back((sharded ? full_tensor(p) : p.detach()).clone());
  return result;
}

void expect_close(const Result& got, const Result& want, double tolerance) {
  for (int s = 0; s < kSteps; ++s) {
    EXPECT_NEAR(got.losses[s], want.losses[s], tolerance * want.losses[s]) << "step " << s;
    EXPECT_NEAR(got.norms[s], want.norms[s], tolerance * want.norms[s]) << "step " << s;
  }
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (size_t i = 0; i < want.weights.size(); ++i) EXPECT_LT(relative_error(got.weights[i], want.weights[i]), tolerance) << "parameter " << i;
}

void expect_same_bits(const Result& got, const Result& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.norms, want.norms);
  for (size_t i = 0; i < want.weights.size(); ++i) EXPECT_TRUE(at::equal(got.weights[i], want.weights[i])) << "parameter " << i;
}

TinyNet sharded_net(const FullyShardOptions& options = {}) {
  auto net = make_tiny_net();
  net->to(world().device());
  shard_tiny_net(net, mesh(), options, options);
  return net;
}

TEST_F(Dist, TrainingEqualsPlainTraining) {
  for (double clip : {1e9, 0.5}) {
    auto want = train(net_on_device(), false, clip);
    for (auto reshard : {std::optional<bool>{}, std::optional<bool>{true}, std::optional<bool>{false}})
      expect_close(train(sharded_net({.reshard_after_forward = reshard}), true, clip), want, 1e-5);
  }
}

TEST_F(Dist, SleepsOnEveryStreamChangeNoBit) {
  auto want = train(sharded_net(), true, 0.5);
  auto compute_sleep = [] { cuda::current_stream(world().device()).sleep(5); };
  world().delays = {.gather = 3};
  expect_same_bits(train(sharded_net(), true, 0.5), want);
  world().delays = {.reduce = 3};
  expect_same_bits(train(sharded_net(), true, 0.5), want);
  world().delays = {};
  expect_same_bits(train(sharded_net(), true, 0.5, compute_sleep), want);
  world().delays = {.gather = 2, .reduce = 3};
  expect_same_bits(train(sharded_net(), true, 0.5, compute_sleep), want);
}

TEST_F(Dist, MixedPrecisionWithSleepsChangesNoBit) {
  FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  auto want = train(sharded_net(options), true, 1.0);
  auto fp32 = train(sharded_net(), true, 1.0);
  for (int s = 0; s < kSteps; ++s) {
    EXPECT_NEAR(want.losses[s], fp32.losses[s], 0.05 * fp32.losses[s]) << "step " << s;
    EXPECT_NE(want.losses[s], fp32.losses[s]) << "bf16 was not used";
  }
  world().delays = {.gather = 2, .reduce = 3};
  expect_same_bits(train(sharded_net(options), true, 1.0, [] { cuda::current_stream(world().device()).sleep(5); }), want);
}

TEST_F(Dist, RepeatedRunsGiveTheSameBits) { expect_same_bits(train(sharded_net(), true, 1.0), train(sharded_net(), true, 1.0)); }

TEST_F(Dist, ParametersAreShardedBetweenSteps) {
  auto net = sharded_net();
  optim::AdamW optimizer(*net, {.lr = kLearningRate});
  for (int s = 0; s < 2; ++s) {
    auto in = ids(s, world().rank());
    token_loss(net(in), in).backward();
    optimizer.step();
    int64_t local = 0, global = 0;
    for (auto& u : units(*net)) EXPECT_TRUE(u.is_sharded());
    for (auto& p : sharded_parameters(*net)) {
      EXPECT_EQ(p.handle.numel(), p.local().size());
      EXPECT_EQ(p.handle.sizes(), p.local_sizes());
      local += p.handle.numel();
      global += p.numel();
    }
    auto sum = at::full({1}, local, at::TensorOptions(world().device()).dtype(at::kLong));
    auto stream = cuda::current_stream(world().device());
    comm::Buffer buffer{sum.mutable_data_ptr(), 1, c10::ScalarType::Long};
    mesh()->reduce_comm().all_reduce(buffer, buffer, comm::ReduceOp::Sum, stream, {}).wait(stream);
    EXPECT_EQ(sum.item<int64_t>(), global);
  }
}

}  // namespace
}  // namespace fsdpp::test

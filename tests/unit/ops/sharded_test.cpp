// All operators of the layer in one sharded model: gradients written to their places, equal to plain training.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "fsdpp/api/checkpoint.h"
#include "fsdpp/base/error.h"
#include "fsdpp/ops/activation.h"
#include "fsdpp/ops/cross_entropy.h"
#include "fsdpp/ops/embedding.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/ops/mlp.h"
#include "fsdpp/ops/rms_norm.h"
#include "fsdpp/ops/rms_norm_linear.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

constexpr int64_t kDim = 6, kHidden = 10, kVocab = 11;
constexpr int kMicro = 2, kSteps = 2;

enum class By { LibTorch, ThisLayer, ThisLayerRecomputed, NormsAgain };

// A block before the head, by LibTorch's operators or by this layer's.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(By by) : by(by) {
    norm1 = register_parameter("norm1", at::ones({kDim})), norm2 = register_parameter("norm2", at::ones({kDim}));
    mix = register_parameter("mix", at::zeros({kDim, kDim})), up = register_parameter("up", at::zeros({kHidden, kDim}));
    gate = register_parameter("gate", at::zeros({kHidden, kDim})), down = register_parameter("down", at::zeros({kDim, kHidden}));
    bias = register_parameter("bias", at::zeros({kDim}));
    gated_down = register_parameter("gated_down", at::zeros({kDim, kHidden}));
    head = register_parameter("head", at::zeros({kVocab, kDim}));
    table = register_parameter("table", at::zeros({kVocab, kDim}));
    fill_parameters(*this, 7);
  }
  at::Tensor forward(const at::Tensor& features, const at::Tensor& targets) {
    const auto ids = targets.flip(-1);
    if (by == By::LibTorch) return forward_plain(features + at::embedding(table, ids), targets);
    auto x = features + ops::embedding(ids, table);
    auto run = [this](const at::Tensor& t) { return block(t); };
    return ops::linear_cross_entropy(by == By::ThisLayerRecomputed ? checkpoint(run, x) : run(x), head, targets, {.chunk_rows = 4});
  }
  at::Tensor block(const at::Tensor& x) {
    auto [y, sum] = ops::add_rms_norm(mixed(x), x, norm2);
    auto h = ops::linear(y, up);
    return sum + ops::silu_linear(h, down, bias) + ops::swiglu_linear(ops::linear(y, gate), h, gated_down) +
           ops::silu_mlp(y, gate, gated_down, {}, bias);
  }
  at::Tensor mixed(const at::Tensor& x) {
    if (by != By::NormsAgain) return ops::linear(ops::rms_norm(x, norm1), mix);
    return ops::rms_norm_linear({.x = x, .residual = {}, .norm_weight = norm1, .weight = mix, .bias = {}, .parts = 1, .eps = {}}).parts[0];
  }
  at::Tensor forward_plain(const at::Tensor& x, const at::Tensor& targets) {
    auto sum = at::linear(at::rms_norm(x, {kDim}, norm1), mix) + x;
    auto y = at::rms_norm(sum, {kDim}, norm2), h = at::linear(y, up);
    sum = sum + at::linear(at::silu(h), down, bias) + at::linear(at::silu(at::linear(y, gate)) * h, gated_down) +
          at::linear(at::silu(at::linear(y, gate)), gated_down, bias);
    return at::cross_entropy_loss(at::linear(sum, head).flatten(0, -2).to(at::kFloat), targets.flatten());
  }
  By by;
  at::Tensor norm1, norm2, mix, up, gate, down, bias, gated_down, head, table;
};
FSDPP_MODULE(Net);

struct Batch {
  at::Tensor x, targets;
};
Batch batch(int seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  auto x = at::randn({2, 5, kDim}, generator);
  return {x, at::randint(kVocab, {2, 5}, generator, at::TensorOptions(at::kLong))};
}

// Gradients after some steps of plain SGD, each of kMicro micro-batches.
std::vector<at::Tensor> train(const std::shared_ptr<World>& world, By by, const MixedPrecisionPolicy& policy, bool sync_each,
                              int buffers) {
  Net net(by);
  auto unit = fully_shard(net, Mesh::shard(world), {.mp_policy = policy});
  unit.set_reduce_scatter_max_input_buffers(buffers);
  std::vector<at::Tensor> result;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < kMicro; ++micro) {
      unit.set_requires_gradient_sync(sync_each || micro == kMicro - 1);
      auto [x, targets] = batch(100 * step + 10 * micro + world->rank());
      net(x, targets).backward();
    }
    result.clear();
    at::NoGradGuard no_grad;
    for (auto& p : net->parameters()) {
      result.push_back(shard::full_tensor(sharding_of(p), p.grad()));
      p.sub_(p.grad(), 0.05);
      p.mutable_grad().reset();
    }
  }
  return result;
}

class ShardedOps : public ::testing::TestWithParam<std::tuple<By, int, int, bool, bool>> {
};  // and ranks, buffers, mixed, sync each

TEST_P(ShardedOps, TrainAsOrdinaryOnes) {
  auto [by, ranks, buffers, mixed, sync_each] = GetParam();
  MixedPrecisionPolicy policy;
  if (mixed) policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  run_local_world(ranks, [&, by = by, buffers = buffers, mixed = mixed, sync_each = sync_each](std::shared_ptr<World> world) {
    auto want = train(world, By::LibTorch, policy, sync_each, buffers), got = train(world, by, policy, sync_each, buffers);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_GT(want[i].abs().sum().item<float>(), 0);
      EXPECT_LT(relative_error(got[i], want[i]), mixed ? 4e-2 : 1e-5) << "parameter " << i;
    }
  });
}

TEST(ShardedNormsAgain, HaveTheBitsOfNormsThatAreKept) {
  for (int ranks : {1, 2})
    run_local_world(ranks, [&](std::shared_ptr<World> world) {
      const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      const auto want = train(world, By::ThisLayer, policy, false, 2), got = train(world, By::NormsAgain, policy, false, 2);
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
    });
}
INSTANTIATE_TEST_SUITE_P(All, ShardedOps,
                         ::testing::Combine(::testing::Values(By::ThisLayer, By::ThisLayerRecomputed, By::NormsAgain), ::testing::Values(1, 2, 3),
                                            ::testing::Values(1, 2), ::testing::Bool(), ::testing::Bool()));

struct ProbeImpl : torch::nn::Module {
  ProbeImpl() { w = register_parameter("w", at::ones({4})); }
  at::Tensor forward(const at::Tensor& x) { return ops::rms_norm(x, w, 0.0); }
  at::Tensor w;
};
FSDPP_MODULE(Probe);

TEST(ShardedRmsNorm, ItsGradientReducedInFp32KeepsWhatBf16WouldRound) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Probe probe;
    fully_shard(probe, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    probe(at::ones({257, 4})).sum().backward();
    EXPECT_TRUE(at::equal(probe->w.grad(), at::full({4}, 257.0)));  // bf16: 256 or 258
  });
}

TEST(ShardedRmsNorm, OutsideTheModulesCallIsAnError) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Probe probe;
    fully_shard(probe, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16}});
    EXPECT_THROW((void)ops::rms_norm(at::ones({2, 4}), probe->w), UsageError);
    at::NoGradGuard no_grad;
    EXPECT_THROW((void)ops::rms_norm(at::ones({2, 4}), probe->w), UsageError);
  });
}

struct TableImpl : torch::nn::Module {
  TableImpl() { table = register_parameter("table", at::ones({5, 3})); }
  at::Tensor forward(const at::Tensor& ids) { return ops::embedding(ids, table); }
  at::Tensor table;
};
FSDPP_MODULE(Table);

// Without its memory in backward. Each rank and micro-batch has 257 tokens of row 2, and bf16 has 256 or 258.
TEST(ShardedEmbedding, ItsGradientIsWrittenInFp32WithoutTheTable) {
  for (int ranks : {1, 2, 3})
    for (int buffers : {1, 2})
      run_local_world(ranks, [&](std::shared_ptr<World> world) {
        Table module;
        auto unit = fully_shard(module, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
        unit.set_reduce_scatter_max_input_buffers(buffers);
        unit.set_unshard_in_backward(false);
        const auto ids = at::full({257}, 2, at::kLong);
        for (int micro = 0; micro < 2; ++micro) {
          auto y = module(ids);
          unit.reshard();
          y.sum().backward();
        }
        const auto got = shard::full_tensor(sharding_of(module->table), module->table.grad());
        auto want = at::zeros({5, 3});
        want[2] = ranks > 1 && buffers < 2 ? 512 : 514;  // a gradient in bf16 while there is no buffer to write it to
        EXPECT_TRUE(at::equal(got, want)) << ranks << " ranks, " << buffers << " buffers: " << got;
      });
}

struct HeadImpl : torch::nn::Module {
  HeadImpl() { w = register_parameter("w", at::zeros({2, 1})); }
  at::Tensor forward(const at::Tensor& x) {
    return ops::linear_cross_entropy(x, w, at::zeros({x.size(0)}, at::kLong), {.chunk_rows = 1});
  }
  at::Tensor w;
};
FSDPP_MODULE(Head);

TEST(ShardedCrossEntropy, ItsGradientReducedInFp32KeepsWhatBf16WouldRound) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    Head head;
    fully_shard(head, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    auto loss = head(at::ones({257, 1}));
    (loss * 514).backward();  // softmax 1/2: -257 for the target, 257 for the other
    EXPECT_TRUE(at::equal(head->w.grad(), at::tensor({-257.0F, 257.0F}).view({2, 1}))) << head->w.grad();
  });
}

// The head's memory is not wanted in backward, so it may stay sharded there.
TEST(ShardedCrossEntropy, InFp16OfAHeadThatIsShardedInBackwardIsScaledAllTheSame) {
  for (int ranks : {1, 2})
    run_local_world(ranks, [&](std::shared_ptr<World> world) {
      Head head;
      auto unit = fully_shard(head, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
      unit.set_reduce_scatter_max_input_buffers(2);
      unit.set_unshard_in_backward(false);
      auto x = at::ones({8, 1}, at::kHalf).requires_grad_();
      auto loss = head(x);
      unit.reshard();
      loss.backward();
      const auto got = shard::full_tensor(sharding_of(head->w), head->w.grad());
      EXPECT_TRUE(at::equal(got, at::tensor({-0.5F, 0.5F}).view({2, 1}))) << ranks << ": " << got;
      EXPECT_TRUE(at::equal(x.grad(), at::zeros({8, 1}, at::kHalf)));  // of weights of 0
    });
}

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    w = register_parameter("w", at::zeros({6, 3})), b = register_parameter("b", at::zeros({6}));
    fill_parameters(*this, 7);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto parts = ops::split_linear(x, w, b, 2);
    return parts[0] * parts[1];
  }
  at::Tensor w, b;
};
FSDPP_MODULE(Layer);

// Gathered again where the input wants a gradient, which reads the weight; else its gradient is made without it.
TEST(ShardedLinear, IsGatheredInBackwardOnDemandAlone) {
  for (int ranks : {1, 2, 3})
    for (int buffers : {1, 2})
      for (bool wants_x : {false, true})
        run_local_world(ranks, [&](std::shared_ptr<World> world) {
          Layer plain, module;
          const auto x = at::randn({4, 3}, at::detail::createCPUGenerator(5)).requires_grad_(wants_x);
          plain->forward(x).square().sum().backward();
          const auto want_x = wants_x ? x.grad().clone() : at::Tensor();
          x.mutable_grad() = at::Tensor();
          auto unit = fully_shard(module, Mesh::shard(world));
          unit.set_reduce_scatter_max_input_buffers(buffers);
          unit.set_unshard_in_backward(false);
          auto y = module(x).square().sum();
          unit.reshard();
          y.backward();
          EXPECT_TRUE(unit.is_sharded());
          for (auto [got, want] : {std::pair(module->w, plain->w), std::pair(module->b, plain->b)})
            EXPECT_TRUE(at::allclose(shard::full_tensor(sharding_of(got), got.grad()), want.grad(), 1e-5, 1e-6)) << ranks << buffers << wants_x;
          EXPECT_TRUE(!wants_x || at::allclose(x.grad(), want_x, 1e-5, 1e-6));
        });
}

}  // namespace
}  // namespace fsdpp::test

// A head's gradient, which forward computes already, lies once in memory.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdpp/engine/gradient_target.h"
#include "fsdpp/ops/cross_entropy.h"
#include "support/byte_count.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kDim = 6, kVocab = 11;

MixedPrecisionPolicy policy_of(bool mixed) {
  return mixed ? MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat} : MixedPrecisionPolicy{};
}

// What the operator below was given.
struct Given {
  const void* early = nullptr;
  const void* target = nullptr;
  bool accumulate = false;
};

// sum(weight), whose gradient forward puts where it may.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, int64_t given) {
    auto early = early_gradient(weight);
    reinterpret_cast<Given*>(given)->early = early ? early->fill_(1).data_ptr() : nullptr;
    context->save_for_backward({weight, early.value_or(at::Tensor())});
    context->saved_data["given"] = given;
    return weight.sum();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto saved = context->get_saved_variables();
    auto& given = *reinterpret_cast<Given*>(context->saved_data["given"].toInt());
    auto target = gradient_target(saved[0], saved[1]);
    given.target = target->out.data_ptr(), given.accumulate = target->accumulate;
    if (given.accumulate)
      target->out.add_(grads[0]);
    else
      target->out.copy_(grads[0].expand_as(target->out));
    return {at::Tensor(), at::Tensor()};
  }
};

struct ProbedImpl : torch::nn::Module {
  ProbedImpl() { w = register_parameter("w", at::ones({kVocab, kDim})); }
  at::Tensor forward(const at::Tensor& x, Given* given) { return Probe::apply(w, reinterpret_cast<int64_t>(given)) * x; }
  at::Tensor w;
};
FSDPP_MODULE(Probed);

class EarlyGradient : public ::testing::TestWithParam<std::tuple<int, bool>> {
 public:
  // A unit of one parameter, on every rank.
  template <class F>
  static void each_rank(F f) {
    auto [ranks, mixed] = GetParam();
    run_local_world(ranks, [&, mixed = mixed](std::shared_ptr<World> world) {
      Probed net;
      auto unit = fully_shard(net, Mesh::shard(world), {.mp_policy = policy_of(mixed)});
      unit.set_reduce_scatter_max_input_buffers(2);
      f(net, unit, static_cast<double>(world->size()));
    });
  }
  static void expect_gradient(const Probed& net, double value) {
    const auto grad = shard::full_tensor(sharding_of(net->w), net->w.grad());
    EXPECT_TRUE(at::equal(grad, at::full({kVocab, kDim}, value))) << grad << value;
  }
};
INSTANTIATE_TEST_SUITE_P(All, EarlyGradient, ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()));

TEST_P(EarlyGradient, IsBackwardsTarget) {
  each_rank([](Probed& net, UnitHandle&, double) {
    for (int step = 0; step < 3; ++step) {
      Given given;
      net(at::ones({}), &given).backward();
      EXPECT_NE(given.early, nullptr);
      EXPECT_EQ(given.target, given.early);
      EXPECT_FALSE(given.accumulate);
      expect_gradient(net, 1);
      net->w.mutable_grad().reset();
    }
  });
}

TEST_P(EarlyGradient, IsGivenOnceAtATimeAndGivenBackWithItsGraph) {
  each_rank([](Probed& net, UnitHandle&, double) {
    int64_t reserved = 0;
    for (int step = 0; step < 3; ++step) {
      Given first, second, third;
      auto loss = net(at::ones({}), &first), other = net(at::ones({}), &second);
      EXPECT_NE(first.early, nullptr);
      EXPECT_EQ(second.early, nullptr);
      loss = at::Tensor();  // nobody goes through it
      other.backward();
      EXPECT_NE(second.target, nullptr);
      expect_gradient(net, 1);
      net->w.mutable_grad().reset();
      net(at::ones({}), &third).backward();
      EXPECT_EQ(third.target, third.early);
      net->w.mutable_grad().reset();
      if (step == 0) reserved = reserved_buffer_bytes(*net);
      EXPECT_EQ(reserved_buffer_bytes(*net), reserved);
    }
  });
}

TEST_P(EarlyGradient, TwoLossesInAnyOrderGiveTheSum) {
  each_rank([](Probed& net, UnitHandle&, double) {
    for (int order : {0, 1, 2}) {
      Given a, b;
      auto first = net(at::full({}, 2.0), &a), second = net(at::full({}, 3.0), &b);
      if (order == 2) {
        (first + second).backward();
      } else {
        (order == 0 ? first : second).backward();
        (order == 0 ? second : first).backward();
      }
      expect_gradient(net, 5);
      net->w.mutable_grad().reset();
    }
  });
}

TEST_P(EarlyGradient, WithGradientsFromBeforeAddsToThem) {
  each_rank([](Probed& net, UnitHandle& unit, double) {
    Given given;
    for (int micro = 0; micro < 3; ++micro) net(at::full({}, 1.0 + micro), &given).backward();
    expect_gradient(net, 6);
    net->w.mutable_grad().reset();
    for (int micro = 0; micro < 3; ++micro) {
      unit.set_requires_gradient_sync(micro == 2);
      net(at::full({}, 1.0 + micro), &given).backward();
    }
    expect_gradient(net, 6);
  });
}

// A head: alone in its unit, or beside a parameter that keeps it from being there early.
struct HeadImpl : torch::nn::Module {
  HeadImpl(bool alone, int64_t vocab, int64_t dim) {
    w = register_parameter("w", at::zeros({vocab, dim}));
    fill_parameters(*this, 7);
    if (!alone) scale = register_parameter("scale", at::ones({}));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets) {
    auto loss = ops::linear_cross_entropy(x, w, targets, {.chunk_rows = 4});
    return scale.defined() ? loss * scale : loss;
  }
  at::Tensor w, scale;
};
FSDPP_MODULE(Head);

std::vector<at::Tensor> head_gradients(const std::shared_ptr<World>& world, bool alone, bool mixed) {
  Head head(alone, kVocab, kDim);
  auto unit = fully_shard(head, Mesh::shard(world), {.mp_policy = policy_of(mixed)});
  unit.set_reduce_scatter_max_input_buffers(2);
  auto loss_of = [&](int seed) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed + 100 * world->rank()));
    auto x = at::randn({10, kDim}, generator);
    return head(x, at::randint(kVocab, {10}, generator, at::TensorOptions(at::kLong)));
  };
  std::vector<at::Tensor> result;
  auto take = [&] {
    result.push_back(shard::full_tensor(sharding_of(head->w), head->w.grad()));
    for (auto& p : head->parameters()) p.mutable_grad().reset();
  };
  for (int seed : {1, 2}) loss_of(seed).backward(), take();
  auto a = loss_of(3), b = loss_of(4);
  b.backward(), a.backward(), take();
  auto c = loss_of(5), d = loss_of(6);
  (c + d).backward(), take();
  for (int micro = 0; micro < 3; ++micro) unit.set_requires_gradient_sync(micro == 2), loss_of(7 + micro).backward();
  take();
  return result;
}

TEST(HeadAloneInItsUnit, HasTheBitsOfOneThatIsNot) {
  for (int ranks : {1, 2, 3})
    for (bool mixed : {false, true})
      run_local_world(ranks, [&](std::shared_ptr<World> world) {
        const auto got = head_gradients(world, true, mixed), want = head_gradients(world, false, mixed);
        for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i << " ranks " << ranks << " mixed " << mixed;
      });
}

// Bytes at once in forward and backward, above what was there before, in weights of fp32.
double weights_at_once(const std::shared_ptr<World>& world, bool alone) {
  constexpr int64_t kRows = 8, kWide = 4096, kDeep = 64;
  Head head(alone, kWide, kDeep);
  fully_shard(head, Mesh::shard(world)).set_reduce_scatter_max_input_buffers(2);
  const auto x = at::ones({kRows, kDeep}), targets = at::zeros({kRows}, at::kLong);
  head(x, targets).backward();
  for (auto& p : head->parameters()) p.mutable_grad().reset();
  ByteCount bytes(world->device());
  head(x, targets).backward();
  return static_cast<double>(bytes.take_peak()) / (4.0 * kWide * kDeep);
}

TEST(HeadAloneInItsUnit, HoldsItsGradientOnce) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    EXPECT_LT(weights_at_once(world, true), 1.2);
    EXPECT_GT(weights_at_once(world, false), 2.0);
  });
  run_local_world(2, [](std::shared_ptr<World> world) {  // the gradient buffer is there since the first step; the slice, half of it, is not
    EXPECT_LT(weights_at_once(world, true), 0.7);
    EXPECT_GT(weights_at_once(world, false), 1.0);
  });
}

}  // namespace
}  // namespace fsdpp::test

// What is recorded of tensors without memory, and what is refused.
#include <torch/nn/init.h>
#include <torch/types.h>

#include <cmath>

#include "unit/engine/deferred_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;

struct Recipe {
  const char* name;
  MakeTensor make;
};

// Everything here is exact: what LibTorch computes at once must come out of the record, bit by bit.
std::vector<Recipe> recipes() {
  using T = at::Tensor;
  return {
      {"zeros", [] { return at::zeros({5, 3}); }},
      {"ones of double", [] { return at::ones({5, 3}, at::kDouble); }},
      {"full", [] { return at::full({7}, 0.1); }},
      {"full of bf16", [] { return at::full({7}, 0.1, at::kBFloat16); }},
      {"scalar", [] { return at::scalar_tensor(3.25); }},
      {"int64 count", [] { return torch::tensor(0, torch::dtype(torch::kLong)); }},
      {"nested list", [] { return torch::tensor({{1.0, 2.0}, {3.0, 4.5}}); }},
      {"bool", [] { return at::full({3}, true, at::kBool); }},
      {"no elements", [] { return at::zeros({0, 4}); }},
      {"padding row", [] { return filled(at::ones({6, 4}), [](T& t) { t[2].zero_(); }); }},
      {"last row by negative index", [] { return filled(at::ones({6, 4}), [](T& t) { t[-1].fill_(7); }); }},
      {"column", [] { return filled(at::zeros({6, 4}), [](T& t) { t.select(1, 1).fill_(2); }); }},
      {"block", [] { return filled(at::zeros({6, 8}), [](T& t) { t.narrow(0, 1, 3).narrow(1, 2, 5).fill_(2); }); }},
      {"every second row", [] { return filled(at::zeros({7, 2}), [](T& t) { t.slice(0, 0, 7, 2).add_(1.5); }); }},
      {"diagonal", [] { return filled(at::zeros({5, 5}), [](T& t) { t.diagonal().fill_(1); }); }},
      {"halves that cover all", [] { return filled(at::empty({6}), [](T& t) { t.narrow(0, 0, 3).fill_(1), t.narrow(0, 3, 3).fill_(2); }); }},
      {"flat view", [] { return filled(at::zeros({4, 4}), [](T& t) { t.view({-1}).narrow(0, 3, 9).fill_(5); }); }},
      {"arithmetic", [] { return filled(at::full({9}, 0.3), [](T& t) { t.mul_(0.7).add_(0.1).div_(3).sub_(0.2, 2).clamp_(-0.32, 1); }); }},
      {"arithmetic in fp16", [] { return filled(at::full({9}, 0.3, at::kHalf), [](T& t) { t.mul_(0.7).add_(0.1).div_(3); }); }},
      {"arithmetic in bf16", [] { return filled(at::full({9}, 0.3, at::kBFloat16), [](T& t) { t.mul_(0.7).add_(0.1).div_(3); }); }},
      {"new tensor by a number", [] { return at::ones({4, 3}) * 0.1 + 0.2; }},
      {"to bf16", [] { return (at::ones({4}) * 0.123456789).to(at::kBFloat16); }},
      {"to bf16 and back", [] { return (at::ones({4}) * 0.123456789).to(at::kBFloat16).to(at::kFloat); }},
      {"clone after which the first changes", [] { T a = at::ones({3}); T b = a.clone(); a.zero_(); return b; }},
      {"copied into rows", [] { return filled(at::zeros({4, 3}), [](T& t) { t.narrow(0, 1, 2).copy_(at::full({2, 3}, 2.5)); }); }},
      {"copied from bf16", [] { return filled(at::zeros({4}), [](T& t) { t.narrow(0, 1, 2).copy_(at::full({2}, 0.1, at::kBFloat16)); }); }},
      {"identity", [] { return at::eye(5); }},
      {"arange", [] { return at::arange(0, 12, 2); }},
      {"linspace then shifted", [] { return filled(at::linspace(0, 1, 7), [](T& t) { t.add_(1); }); }},
      {"rotary frequencies", [] { return 1.0 / at::pow(10000.0, at::arange(0, 16, 2, at::kFloat) / 16); }},
      {"rotary table", [] { return at::outer(at::arange(10, at::kFloat), 1.0 / at::pow(1e4, at::arange(0, 8, 2, at::kFloat) / 8)).cos(); }},
      {"complex frequencies", [] { auto a = at::arange(6, at::kFloat); return at::polar(at::ones_like(a), a); }},
      {"operators without a meta kernel", [] { return filled(at::arange(-3, 3, at::kFloat).abs().view({2, 3}), [](T& t) { t.narrow(0, 0, 1).mul_(2); }); }},
      {"causal mask", [] { return at::full({6, 6}, -HUGE_VAL).triu(1); }},
      {"lower triangle of bool", [] { return at::ones({6, 6}, at::kBool).tril(); }},
      {"positions", [] { return at::arange(9).unsqueeze(0).expand({1, -1}).contiguous(); }},
      {"joined", [] { return at::cat({at::zeros({2}), at::ones({3}), at::arange(2, at::kFloat)}); }},
      {"snapshot before a later change", [] { T a = at::arange(4, at::kFloat), b = a.exp(); a.zero_(); return b; }},
      {"dirac", [] { return torch::nn::init::dirac_(at::empty({4, 3, 3})); }},
      {"uniform overwritten", [] { return filled(at::empty({4}), [](T& t) { t.uniform_().fill_(2); }); }},
      {"what cannot be recorded, overwritten", [] { return filled(at::ones({4}), [](T& t) { t.cumsum_(0).exponential_().fill_(2); }); }},
      {"transposed", [] { return filled(at::zeros({4, 6}), [](T& t) { t[1].fill_(3), t.select(1, 2).add_(1); }).t(); }},
      {"channels last", [] { return filled(at::zeros({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast), [](T& t) { t.select(1, 1).fill_(3); }); }},
  };
}

TEST(DeferredRecord, ExactRecipesGiveLibTorchsValues) {
  for (auto& recipe : recipes()) {
    SCOPED_TRACE(recipe.name);
    Holder plain(recipe.make);
    const auto late = deferred([&] { return std::make_shared<Holder>(recipe.make); });
    EXPECT_TRUE(late->value.is_meta());
    EXPECT_EQ(late->value.sizes(), plain.value.sizes());
    const auto handle = late->value;
    materialize(*late);
    EXPECT_TRUE(handle.is_cpu());
    EXPECT_EQ(handle.scalar_type(), plain.value.scalar_type());
    EXPECT_EQ(handle.strides(), plain.value.strides());
    EXPECT_TRUE(at::equal(handle, plain.value)) << handle << plain.value;
  }
}

TEST(DeferredRecord, ExactRecipesGiveTheSameOnEveryNumberOfRanks) {
  for (auto& recipe : recipes()) {
    Holder plain(recipe.make);
    if (!at::isFloatingType(plain.value.scalar_type())) continue;
    for (int size : {1, 2, 3})
      run_local_world(size, [&](std::shared_ptr<World> world) {
        SCOPED_TRACE(recipe.name);
        auto late = deferred([&] { return std::make_shared<Holder>(recipe.make); });
        fully_shard(late, Mesh::shard(world));
        materialize(*late);
        EXPECT_TRUE(at::equal(full_tensor(late->value), plain.value)) << full_tensor(late->value) << plain.value;
      });
  }
}

TEST(DeferredRecord, ScopesNestPauseAndEnd) {
  EXPECT_FALSE(DeferredInit::active());
  {
    const DeferredInit outer;
    EXPECT_TRUE(at::empty({2}).is_meta());
    {
      const DeferredInit inner;
      const DeferredInit::Pause pause;
      EXPECT_FALSE(DeferredInit::active());
      EXPECT_TRUE(at::zeros({2}).is_cpu());
      EXPECT_EQ(at::tensor({1.0, 2.0}).sum().item<double>(), 3);
    }
    EXPECT_TRUE(at::empty({2}).is_meta());
    try {
      const DeferredInit thrown;
      throw 1;
    } catch (int) {
    }
    EXPECT_TRUE(DeferredInit::active());
  }
  EXPECT_FALSE(DeferredInit::active());
  EXPECT_TRUE(at::empty({2}).is_cpu());
}

TEST(DeferredRecord, OperatorsAfterTheScopeAreRecordedToo) {
  auto linear = deferred([] { return torch::nn::Linear(4, 3); });
  torch::nn::init::constant_(linear->weight, 0.5);
  linear->to(at::kDouble);
  torch::nn::init::ones_(linear->bias);
  materialize(*linear);
  EXPECT_TRUE(at::equal(linear->weight, at::full({3, 4}, 0.5, at::kDouble)));
  EXPECT_TRUE(at::equal(linear->bias, at::ones({3}, at::kDouble)));
  EXPECT_TRUE(linear->weight.requires_grad());
  linear(at::ones({2, 4}, at::kDouble)).sum().backward();
  EXPECT_TRUE(at::equal(linear->weight.grad(), at::full({3, 4}, 2.0, at::kDouble)));
}

TEST(DeferredRecord, WhatCannotBeRecordedIsNamedBeforeAnythingIsChanged) {
  struct Case {
    const char* op;
    MakeTensor make;
  };
  const std::vector<Case> cases = {
      {"aten::empty", [] { return at::empty({4, 4}); }},
      {"aten::exponential_", [] { return filled(at::zeros({4, 4}), [](at::Tensor& t) { t.exponential_(); }); }},
      {"aten::exponential_", [] { return filled(at::zeros({4, 4}), [](at::Tensor& t) { t[3].exponential_(); }); }},
      {"aten::relu_", [] { return filled(at::randn({4, 4}), [](at::Tensor& t) { t.relu_(); }); }},
      {"aten::exp", [] { return at::randn({4, 4}).exp(); }},
      {"aten::add", [] { return at::randn({4, 4}) + at::randn({4, 4}); }},
      {"aten::copy_", [] { return filled(at::zeros({4, 4}), [](at::Tensor& t) { t.copy_(at::randn({4, 4}).t()); }); }},
      {"aten::copy_", [] { return torch::nn::init::orthogonal_(at::empty({4, 4})); }},
  };
  for (auto& c : cases) {
    struct Two : torch::nn::Module {
      explicit Two(const MakeTensor& make) {
        good = register_parameter("good", at::ones({3}));
        bad = register_parameter("bad", make());
      }
      at::Tensor good, bad;
    };
    auto make = [&] { return deferred([&] { return std::make_shared<Two>(c.make); }); };
    auto plain = make();
    const auto message = message_of<UsageError>([&] { materialize(*plain); });
    EXPECT_NE(message.find("'bad'"), message.npos) << message;
    EXPECT_NE(message.find("MaterializeOptions::init"), message.npos) << message;
    EXPECT_NE(message.find(c.op), message.npos) << c.op << ": " << message;
    EXPECT_TRUE(plain->good.is_meta());
    materialize(*plain, {.init = [](const std::string& name, InitTarget& t) { return name == "bad" ? t.constant(3), true : false; }});
    EXPECT_TRUE(at::equal(plain->bad.detach(), at::full({4, 4}, 3.0)));
    EXPECT_TRUE(at::equal(plain->good.detach(), at::ones({3})));
    run_local_world(2, [&](std::shared_ptr<World> world) {
      auto two = make();
      fully_shard(two, Mesh::shard(world));
      const auto sharded = message_of<UsageError>([&] { materialize(*two); });
      EXPECT_EQ(sharded.substr(sharded.find("materialize")), message.substr(message.find("materialize")));
      EXPECT_TRUE(two->good.is_meta());
    });
  }
}

TEST(DeferredRecord, UnrecordedBufferIsNamed) {
  struct Noise : torch::nn::Module {
    Noise() { register_buffer("noise", at::randn({3}).abs()); }
  };
  auto noise = deferred([] { return std::make_shared<Noise>(); });
  const auto message = message_of<UsageError>([&] { materialize(*noise); });
  EXPECT_NE(message.find("'noise'"), message.npos) << message;
  EXPECT_NE(message.find("aten::abs"), message.npos) << message;
}

TEST(DeferredRecord, MetaTensorsOfUnknownOriginAreNamed) {
  auto holder = std::make_shared<Holder>([] { return at::zeros({3}, at::TensorOptions(c10::kMeta)); });
  const auto message = message_of<UsageError>([&] { materialize(*holder); });
  EXPECT_NE(message.find("'value' is on the meta device, but not by fsdpp::DeferredInit"), message.npos) << message;
  materialize(*holder, {.fill = false});
  EXPECT_TRUE(holder->value.is_cpu());
}

TEST(DeferredRecord, LargeReplayedValuesOfShardedParametersAreRefused) {
  run_local_world(2, [&](std::shared_ptr<World> world) {
    auto holder = deferred([] { return std::make_shared<Holder>([] { return at::eye(4200); }); });
    fully_shard(holder, Mesh::shard(world));
    const auto message = message_of<UsageError>([&] { materialize(*holder); });
    EXPECT_NE(message.find("aten::eye"), message.npos) << message;
    EXPECT_NE(message.find("17640000 elements"), message.npos) << message;
  });
}

}  // namespace
}  // namespace fsdpp::test

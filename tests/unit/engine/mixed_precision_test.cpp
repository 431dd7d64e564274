// dtypes of arguments, results and buffers under a MixedPrecisionPolicy; what reaches forward as it is; forwards of part of a
// unit, without gradients, and in inference mode.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

#include "fsdpp/api/checkpoint.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using torch::nn::Linear;

constexpr auto kHalf = at::kHalf, kBf16 = at::kBFloat16, kFloat = at::kFloat;

void each_rank(const std::function<void(std::shared_ptr<World>)>& body) { run_local_world(2, body); }
at::Tensor random(at::IntArrayRef sizes, uint64_t seed) { return at::randn(sizes, at::detail::createCPUGenerator(seed)); }
at::Tensor full_grad(const at::Tensor& p) { return shard::full_tensor(sharding_of(p), p.grad()); }
FullyShardOptions in_dtype(c10::ScalarType dtype, std::optional<c10::ScalarType> out = std::nullopt) {
  return {.mp_policy = {.param_dtype = dtype, .reduce_dtype = kFloat, .output_dtype = out}};
}

// A module with one weight, called through call_as with any function.
std::shared_ptr<torch::nn::Module> make_unit(const std::shared_ptr<World>& world, const FullyShardOptions& options = {}) {
  auto m = std::make_shared<torch::nn::Module>("unit");
  m->register_parameter("w", at::ones({3}));
  fully_shard(m, Mesh::shard(world), options);
  return m;
}

struct Sample {
  at::Tensor image;
  std::map<std::string, at::Tensor> extra;
  at::Tensor ids;
};
template <class F>
void visit_tensors(Sample& s, F&& f) {
  f(s.image);
  fsdpp::visit_tensors(s.extra, f);
  f(s.ids);
}

// -- arguments and results -----------------------------------------------------------------------------------------------

TEST(MixedPrecisionArguments, TensorsAreFoundInStructsTuplesMapsAndVectorsBothWays) {
  each_rank([](std::shared_ptr<World> world) {
    auto m = make_unit(world, in_dtype(kBf16, kHalf));
    Sample sample{at::ones({2}), {{"depth", at::ones({2}, at::kDouble)}}, at::ones({2}, at::kLong)};
    std::tuple<at::Tensor, int, std::vector<at::Tensor>> pair{at::ones({2}), 3, {at::ones({2}), at::Tensor()}};
    auto out = call_as(
        *m,
        [](const Sample& s, const std::tuple<at::Tensor, int, std::vector<at::Tensor>>& t, std::optional<at::Tensor> none) {
          EXPECT_EQ(s.image.scalar_type(), kBf16);
          EXPECT_EQ(s.extra.at("depth").scalar_type(), kBf16);
          EXPECT_EQ(s.ids.scalar_type(), at::kLong);
          EXPECT_EQ(std::get<0>(t).scalar_type(), kBf16);
          EXPECT_EQ(std::get<2>(t)[0].scalar_type(), kBf16);
          EXPECT_FALSE(none.has_value());
          return std::pair(s, t);
        },
        sample, pair, std::optional<at::Tensor>());
    EXPECT_EQ(out.first.image.scalar_type(), kHalf);
    EXPECT_EQ(out.first.extra.at("depth").scalar_type(), kHalf);
    EXPECT_EQ(out.first.ids.scalar_type(), at::kLong);
    EXPECT_EQ(std::get<2>(out.second)[0].scalar_type(), kHalf);
    EXPECT_EQ(sample.image.scalar_type(), kFloat);  // the caller's own
    EXPECT_EQ(std::get<0>(pair).scalar_type(), kFloat);
  });
}

TEST(MixedPrecisionArguments, NoCastKeepsOneArgumentAsItIs) {
  each_rank([](std::shared_ptr<World> world) {
    auto m = make_unit(world, in_dtype(kBf16));
    auto angles = at::ones({2}), x = at::ones({2});
    std::vector<at::Tensor> cache{at::ones({2})};
    auto forward = [&](const at::Tensor& a, const at::Tensor& b, std::vector<at::Tensor>& c) {
      EXPECT_EQ(a.scalar_type(), kBf16);
      EXPECT_EQ(&b, &angles);
      EXPECT_EQ(&c, &cache);
      c.push_back(b);
      return a.to(kFloat) + b;
    };
    EXPECT_EQ(call_as(*m, forward, x, no_cast(angles), no_cast(cache)).scalar_type(), kFloat);
    EXPECT_EQ(cache.size(), 2u);
    EXPECT_EQ(call_as(*m, [](at::Tensor t) { return t; }, no_cast(at::ones({2}))).scalar_type(), kFloat);
  });
}

struct RotateImpl : torch::nn::Module {
  RotateImpl() { w = register_parameter("w", at::ones({3}) * 2); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& angles) {
    seen.emplace_back(x.scalar_type(), angles.scalar_type());
    return at::sigmoid(x * w) * at::cos(angles).to(x.scalar_type());
  }
  at::Tensor w;
  std::vector<std::pair<c10::ScalarType, c10::ScalarType>> seen;
};
FSDPP_MODULE(Rotate);

TEST(MixedPrecisionArguments, NoCastWorksWithoutAUnitAndInARecomputedCall) {
  each_rank([](std::shared_ptr<World> world) {
    Rotate plain, sharded;
    auto x = at::ones({3}), angles = at::ones({3});
    EXPECT_EQ(plain(x, no_cast(angles)).scalar_type(), kFloat);
    fully_shard(sharded, Mesh::shard(world), in_dtype(kBf16));
    checkpoint(sharded, x, no_cast(angles)).sum().backward();
    EXPECT_EQ(sharded->seen, (std::vector<std::pair<c10::ScalarType, c10::ScalarType>>{{kBf16, kFloat}, {kBf16, kFloat}}));
  });
}

TEST(MixedPrecisionArguments, WithoutAnythingToCastForwardGetsTheCallersOwnObjects) {
  each_rank([](std::shared_ptr<World> world) {
    auto plain = make_unit(world), casting = make_unit(world, in_dtype(kBf16));
    for (auto& m : {plain, casting}) {
      int count = 0;
      std::string name = "a";
      std::vector<at::Tensor> list{at::ones({2}, m == casting ? kBf16 : kFloat)};
      auto x = at::ones({2}, at::kLong), before = x;
      auto owned = std::make_unique<int>(7);
      auto result = call_as(
          *m,
          [&](int& c, std::string& n, std::vector<at::Tensor>& l, at::Tensor& t, std::unique_ptr<int> o, const at::Tensor& same) {
            EXPECT_EQ(&same, &before);
            EXPECT_EQ(*o, 7);
            ++c, n += "b", l.push_back(t), t = t + 1;
            return t;
          },
          count, name, list, x, std::move(owned), std::as_const(before));
      EXPECT_EQ(count, 1);
      EXPECT_EQ(name, "ab");
      EXPECT_EQ(list.size(), 2u);
      EXPECT_TRUE(x.is_same(result));
    }
  });
}

TEST(MixedPrecisionArguments, AnArgumentThatIsCastIsACopy) {
  each_rank([](std::shared_ptr<World> world) {
    auto m = make_unit(world, in_dtype(kBf16));
    std::vector<at::Tensor> list{at::ones({2})};
    call_as(*m, [&](std::vector<at::Tensor>& l) { EXPECT_EQ(l[0].scalar_type(), kBf16), l.clear(); }, list);
    ASSERT_EQ(list.size(), 1u);
    EXPECT_EQ(list[0].scalar_type(), kFloat);
  });
}

TEST(MixedPrecisionArguments, CastsOffLeaveInputsAlone) {
  each_rank([](std::shared_ptr<World> world) {
    auto options = in_dtype(kBf16);
    options.mp_policy.cast_forward_inputs = false;
    auto m = make_unit(world, options);
    auto x = at::ones({2});
    (void)call_as(*m, [&](const at::Tensor& t) { EXPECT_EQ(&t, &x); return t; }, x);
  });
}

// -- models --------------------------------------------------------------------------------------------------------------

// linear → inner linear, which may also get an input from outside.
struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    first = register_module("first", Linear(4, 4));
    inner = register_module("inner", Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = first(x);
    outside = outside.defined() ? outside : h;
    auto y = call_as(*inner, [&](const at::Tensor& a, const at::Tensor& b) {
      seen = {a.scalar_type(), b.scalar_type()};
      return inner->forward(a) * b;
    }, h, outside);
    out = y.scalar_type();
    return y.to(first->weight.scalar_type()) + h;
  }
  Linear first{nullptr}, inner{nullptr};
  at::Tensor outside;
  std::pair<c10::ScalarType, c10::ScalarType> seen;
  c10::ScalarType out = kFloat;
};
FSDPP_MODULE(Outer);

Outer make_outer() {
  Outer m;
  fill_parameters(*m, 4);
  return m;
}

// What the sharded model computes, by hand.
at::Tensor by_hand(const Outer& m, const at::Tensor& x, c10::ScalarType inner) {
  auto h = at::linear(x, m->first->weight, m->first->bias);
  auto cast = [&](const at::Tensor& t) { return t.to(inner); };
  return (at::linear(cast(h), cast(m->inner->weight), cast(m->inner->bias)) * cast(h)).to(kFloat) + h;
}

TEST(MixedPrecisionModels, Float16OnOneSubmodule) {
  each_rank([](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto sharded = make_outer(), plain = make_outer();
    fully_shard(sharded->inner, mesh, in_dtype(kHalf));
    fully_shard(sharded, mesh);
    auto x = random({3, 4}, 5);
    auto y = sharded(x), expected = by_hand(plain, x, kHalf);
    EXPECT_EQ(sharded->seen, std::pair(kHalf, kHalf));
    EXPECT_EQ(sharded->out, kHalf);
    EXPECT_TRUE(at::equal(y, expected));
    y.sum().backward(), expected.sum().backward();
    auto a = sharded->parameters(), b = plain->parameters();
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].grad().scalar_type(), kFloat);
      EXPECT_LT(relative_error(full_grad(a[i]), b[i].grad()), 1e-6);
    }
  });
}

TEST(MixedPrecisionModels, SubmodulesWithExternalInputs) {
  each_rank([](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    for (bool casts : {true, false}) {
      auto sharded = make_outer();
      auto options = in_dtype(kBf16);
      options.mp_policy.cast_forward_inputs = casts;
      fully_shard(sharded->inner, mesh, options);
      fully_shard(sharded, mesh, in_dtype(kBf16));
      sharded->outside = random({3, 4}, 6);  // fp32, from nobody's forward
      auto y = sharded(random({3, 4}, 5));
      EXPECT_EQ(sharded->seen, std::pair(kBf16, casts ? kBf16 : kFloat));
      EXPECT_EQ(sharded->out, casts ? kBf16 : kFloat);
      EXPECT_EQ(sharded->outside.scalar_type(), kFloat);
    }
  });
}

TEST(MixedPrecisionModels, CheckpointRecomputeCastsForwardInputsAndOutputs) {
  each_rank([](std::shared_ptr<World> world) {
    Rotate sharded, plain;
    fully_shard(sharded, Mesh::shard(world), in_dtype(kBf16, kFloat));
    auto x = random({3}, 7).requires_grad_(), angles = random({3}, 8);
    auto y = checkpoint([&](const at::Tensor& a) {
      auto out = sharded(a, angles);
      EXPECT_EQ(out.scalar_type(), kFloat);
      return at::tanh(out);
    }, x);
    auto w = plain->w.to(kBf16);
    auto expected = at::tanh((at::sigmoid(x.detach().to(kBf16) * w) * at::cos(angles.to(kBf16))).to(kFloat));
    EXPECT_TRUE(at::equal(y, expected));
    y.sum().backward(), expected.sum().backward();
    EXPECT_EQ(sharded->seen, (std::vector<std::pair<c10::ScalarType, c10::ScalarType>>{{kBf16, kBf16}, {kBf16, kBf16}}));
    EXPECT_EQ(x.grad().scalar_type(), kFloat);
    EXPECT_LT(relative_error(full_grad(sharded->w), plain->w.grad()), 1e-6);
  });
}

// -- buffers and norms ---------------------------------------------------------------------------------------------------

struct BufferedImpl : torch::nn::Module {
  BufferedImpl() {
    w = register_parameter("w", at::ones({3}));
    mean = register_buffer("mean", at::full({3}, 1.0f / 3));
    steps = register_buffer("steps", at::ones({1}, at::kLong));
  }
  at::Tensor w, mean, steps;
};

TEST(MixedPrecisionBuffers, KeepTheirDtypeUnlessAskedAndThenOnlyTheUnitsOwn) {
  each_rank([](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto outer = std::make_shared<BufferedImpl>(), inner = std::make_shared<BufferedImpl>(), leaf = std::make_shared<BufferedImpl>();
    auto below = std::make_shared<BufferedImpl>();
    outer->register_module("inner", inner), outer->register_module("leaf", leaf), inner->register_module("below", below);
    fully_shard(inner, mesh, in_dtype(kBf16));
    auto options = in_dtype(kBf16);
    options.mp_policy.buffer_dtype = kHalf;
    fully_shard(outer, mesh, options);
    for (auto& m : {outer, leaf}) {
      EXPECT_EQ(m->mean.scalar_type(), kHalf);
      EXPECT_TRUE(at::equal(m->mean, at::full({3}, 1.0f / 3).to(kHalf)));
      EXPECT_EQ(m->named_buffers(false)["mean"].scalar_type(), kHalf);
      EXPECT_EQ(m->steps.scalar_type(), at::kLong);
    }
    for (auto& m : {inner, below}) EXPECT_EQ(m->mean.scalar_type(), kFloat);
  });
}

TEST(MixedPrecisionBuffers, AnIntegerDtypeIsRefusedBeforeAnythingChanges) {
  each_rank([](std::shared_ptr<World> world) {
    auto m = std::make_shared<BufferedImpl>();
    FullyShardOptions options;
    options.mp_policy.buffer_dtype = at::kInt;
    EXPECT_THROW(fully_shard(m, Mesh::shard(world), options), ConfigError);
    EXPECT_EQ(m->w.numel(), 3);
  });
}

template <class Norm>
at::Tensor norm_step(Norm& norm, const at::Tensor& x) {
  auto y = call(norm, x);
  EXPECT_EQ(y.scalar_type(), x.scalar_type());
  y.sum().backward();
  return y;
}

TEST(MixedPrecisionNorms, LayerAndGroupNormTrainIn16Bits) {
  for (auto dtype : {kBf16, kHalf})
    each_rank([&](std::shared_ptr<World> world) {
      auto mesh = Mesh::shard(world);
      torch::nn::LayerNorm layer(torch::nn::LayerNormOptions({4}));
      torch::nn::GroupNorm group(torch::nn::GroupNormOptions(2, 4));
      auto x = random({3, 4}, 5).to(dtype);
      auto expected = at::layer_norm(x, {4}, at::ones({4}, dtype), at::zeros({4}, dtype));
      fully_shard(layer, mesh, in_dtype(dtype)), fully_shard(group, mesh, in_dtype(dtype));
      EXPECT_TRUE(at::equal(norm_step(layer, x), expected));
      (void)norm_step(group, x);
      for (auto& p : {layer->weight, group->weight}) EXPECT_EQ(p.grad().scalar_type(), kFloat);
    });
}

TEST(MixedPrecisionNorms, BatchNormIn16BitsKeepsItsStatisticsIn32WhateverThePolicy) {
  for (auto buffers : {std::optional<c10::ScalarType>(), std::optional(kBf16)})
    each_rank([&](std::shared_ptr<World> world) {
      torch::nn::BatchNorm1d sharded(4), plain(4);
      auto options = in_dtype(kBf16);
      options.mp_policy.buffer_dtype = buffers;
      fully_shard(sharded, Mesh::shard(world), options);
      for (int i = 0; i < 3; ++i) {
        auto x = random({64, 4}, 20 + i).to(kBf16);
        EXPECT_TRUE(at::equal(norm_step(sharded, x), plain(x)));
      }
      EXPECT_EQ(sharded->running_mean.scalar_type(), kFloat);
      EXPECT_EQ(sharded->weight.grad().scalar_type(), kFloat);
      EXPECT_TRUE(at::equal(sharded->running_mean, plain->running_mean));
      EXPECT_TRUE(at::equal(sharded->running_var, plain->running_var));
      EXPECT_EQ(sharded->num_batches_tracked.item<int64_t>(), 3);
    });
}

// -- part of a unit, no gradients ----------------------------------------------------------------------------------------

struct Trio {
  Trio() {
    for (int i = 0; i < 3; ++i) {
      linears.emplace_back(4, 4);
      fill_parameters(*linears.back(), 30 + i);
    }
  }
  [[nodiscard]] std::vector<std::shared_ptr<torch::nn::Module>> modules() const { return {linears[0].ptr(), linears[1].ptr(), linears[2].ptr()}; }
  std::vector<Linear> linears;
};

TEST(ListUnit, SomeOfItsModulesInAnyOrderTrainAsUnsharded) {
  for (auto& order : std::vector<std::vector<size_t>>{{0, 2}, {2, 0}, {1}, {1, 1}, {0, 1, 2}})
    each_rank([&](std::shared_ptr<World> world) {
      Trio sharded, plain;
      auto unit = fully_shard(sharded.modules(), Mesh::shard(world), {.reshard_after_forward = true});
      for (int step = 0; step < 2; ++step) {
        auto x = random({2, 4}, 40 + step), y = x;
        for (auto i : order) x = at::tanh(call(sharded.linears[i], x)), y = at::tanh(plain.linears[i](y));
        EXPECT_TRUE(at::equal(x, y));
        EXPECT_TRUE(unit.is_sharded());
        x.sum().backward(), y.sum().backward();
        EXPECT_TRUE(unit.is_sharded());
      }
      for (size_t i = 0; i < 3; ++i)
        for (size_t k = 0; k < 2; ++k) {
          auto a = sharded.linears[i]->parameters()[k], b = plain.linears[i]->parameters()[k];
          ASSERT_EQ(a.grad().defined(), b.grad().defined());
          if (!b.grad().defined()) continue;
          EXPECT_LT(relative_error(full_grad(a), b.grad()), 1e-6);
        }
      EXPECT_EQ(unit.stats().reduces, 2);
      EXPECT_EQ(unit.stats().backward_gathers, 2);
    });
}

template <class Guard>
void evaluate_between_steps(const std::shared_ptr<World>& world) {
  auto mesh = Mesh::shard(world);
  auto sharded = make_tiny_net(), plain = make_tiny_net();
  shard_tiny_net(sharded, mesh, {.mp_policy = {.param_dtype = kFloat}});
  auto ids = tokens(5);
  for (int step = 0; step < 2; ++step) {
    {
      Guard guard;
      auto a = sharded(ids), b = plain(ids);
      EXPECT_TRUE(at::equal(a, b));
      EXPECT_FALSE(a.requires_grad());
      for (auto& u : units(*sharded)) EXPECT_TRUE(u.is_sharded()) << u.name();
      EXPECT_TRUE(at::equal(full_tensor(sharded->head->weight), plain->head->weight));
    }
    token_loss(sharded(ids), ids).backward(), token_loss(plain(ids), ids).backward();
    auto a = sharded->parameters(), b = plain->parameters();
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_LT(relative_error(full_grad(a[i]), b[i].grad()), 1e-5);
      a[i].sub_(a[i].grad(), 0.5);
      b[i].copy_(full_tensor(a[i]));
    }
  }
}

TEST(Evaluation, UnderNoGradAndInInferenceModeBetweenTrainingSteps) {
  each_rank([](std::shared_ptr<World> world) {
    evaluate_between_steps<at::NoGradGuard>(world);
    evaluate_between_steps<c10::InferenceMode>(world);
  });
}

TEST(Evaluation, ListUnitsAndUnshardInInferenceMode) {
  each_rank([](std::shared_ptr<World> world) {
    Trio sharded, plain;
    auto unit = fully_shard(sharded.modules(), Mesh::shard(world), in_dtype(kBf16, kFloat));
    auto x = random({2, 4}, 40);
    c10::InferenceMode inference;
    unit.unshard();
    EXPECT_TRUE(call(sharded.linears[1], x).is_inference());
    EXPECT_TRUE(at::equal(call(sharded.linears[1], x), at::linear(x.to(kBf16), plain.linears[1]->weight.to(kBf16), plain.linears[1]->bias.to(kBf16)).to(kFloat)));
    EXPECT_TRUE(unit.is_sharded());
  });
}

}  // namespace
}  // namespace fsdpp::test

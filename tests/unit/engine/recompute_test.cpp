// fsdpp::checkpoint: results as without it, less kept, each unit gathered once for backward.
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "fsdpp/api/checkpoint.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) { return at::randn(sizes, at::detail::createCPUGenerator(seed)); }
at::Tensor leaf(at::IntArrayRef sizes, uint64_t seed = 1) { return random(sizes, seed).requires_grad_(); }
void expect_equal(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) return;
  EXPECT_TRUE(at::equal(a, b)) << a << "\nexpected\n" << b;
}
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
Weak watch(const at::Tensor& t) { return t.storage().getWeakStorageImpl(); }

template <class F>
std::string usage_error(F&& f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no error";
}

// -- without units -------------------------------------------------------------------------------------------------------

at::Tensor feed(const at::Tensor& x, const at::Tensor& w) { return at::sigmoid(at::mm(at::tanh(x), w)) * x; }

TEST(Checkpoint, GradientsAreThoseOfThePlainCall) {
  auto x = leaf({3, 3}), w = leaf({3, 3}, 2), x2 = leaf({3, 3}), w2 = leaf({3, 3}, 2);
  auto y = checkpoint(feed, x, w), y2 = feed(x2, w2);
  expect_equal(y, y2);
  (y * y).sum().backward(), (y2 * y2).sum().backward();
  expect_equal(x.grad(), x2.grad());
  expect_equal(w.grad(), w2.grad());
}

TEST(Checkpoint, IntermediateTensorsAreGoneAfterForwardAndTheRecomputedOnesAfterBackward) {
  std::vector<Weak> seen;
  auto fn = [&](const at::Tensor& x) {
    auto h = at::tanh(x);
    seen.push_back(watch(h));
    auto g = at::sigmoid(h);
    seen.push_back(watch(g));
    return g.sum();
  };
  auto x = leaf({3});
  auto kept = fn(x);
  EXPECT_FALSE(seen[0].expired());  // what the plain graph keeps
  auto y = checkpoint(fn, x);
  EXPECT_TRUE(seen[2].expired());
  EXPECT_TRUE(seen[3].expired());
  y.backward({}, /*retain_graph=*/true);
  ASSERT_EQ(seen.size(), 5u);
  EXPECT_TRUE(seen[4].expired());
}

TEST(Checkpoint, RunsAgainOnlyAsFarAsBackwardNeeds) {
  for (bool early_stop : {true, false}) {
    int runs = 0, ends = 0;
    auto fn = [&](const at::Tensor& x) {
      ++runs;
      auto y = at::sigmoid(x);  // saves its result
      ++ends;
      return y + 1;
    };
    auto x = leaf({3});
    checkpoint({.early_stop = early_stop}, fn, x).sum().backward();
    EXPECT_EQ(runs, 2);
    EXPECT_EQ(ends, early_stop ? 1 : 2);
  }
}

TEST(Checkpoint, FunctionThatSavesNothingOrIsNotReachedIsNotRunAgain) {
  int runs = 0;
  auto add = [&](const at::Tensor& x) { return ++runs, x + 1; };
  auto x = leaf({3});
  (checkpoint(add, x) + x).sum().backward();
  EXPECT_EQ(runs, 1);
  auto square = [&](const at::Tensor& x) { return ++runs, x * x; };
  auto unused = checkpoint(square, x);
  (x * 2).sum().backward();
  EXPECT_EQ(runs, 2);
}

TEST(Checkpoint, CatchAllInsideTheFunctionDoesNotKeepItFromStopping) {
  int caught = 0;
  auto fn = [&](const at::Tensor& x) {
    at::Tensor y;
    try {
      y = at::sigmoid(x);
    } catch (const std::exception&) {
      ADD_FAILURE() << "the end of a recomputation is no error";
    } catch (...) {
      ++caught;
      y = x;
    }
    return y * 2;
  };
  auto x = leaf({3}), x2 = leaf({3});
  checkpoint(fn, x).sum().backward();
  (at::sigmoid(x2) * 2).sum().backward();
  EXPECT_EQ(caught, 1);
  expect_equal(x.grad(), x2.grad());
}

TEST(Checkpoint, DropoutDrawsTheSameMaskAndLeavesTheGeneratorAlone) {
  for (bool preserve : {true, false}) {
    at::manual_seed(5);
    auto x = at::ones({1000}).requires_grad_();
    auto y = checkpoint({.preserve_rng_state = preserve}, [](const at::Tensor& t) { return at::dropout(t, 0.5, true); }, x);
    auto state = at::detail::getDefaultCPUGenerator().get_state();
    (void)at::rand({7});
    auto moved = at::detail::getDefaultCPUGenerator().get_state();
    y.sum().backward();
    EXPECT_EQ(at::equal(x.grad(), y), preserve);
    EXPECT_EQ(at::equal(at::detail::getDefaultCPUGenerator().get_state(), moved), preserve);
    EXPECT_FALSE(at::equal(state, moved));
  }
}

TEST(Checkpoint, NestedCallsDropTheirInputsTooAndAgree) {
  int inner_runs = 0, outer_runs = 0;
  std::vector<Weak> inputs;
  auto inner = [&](const at::Tensor& x) { return ++inner_runs, at::sigmoid(at::tanh(x)); };
  auto outer = [&](const at::Tensor& x) {
    ++outer_runs;
    auto h = at::exp(x);
    inputs.push_back(watch(h));
    return at::tanh(checkpoint(inner, h));
  };
  auto x = leaf({4}), x2 = leaf({4});
  auto y = checkpoint([&](const at::Tensor& t) { return checkpoint(outer, t * 2); }, x);
  EXPECT_TRUE(inputs[0].expired());
  y.sum().backward();
  at::tanh(at::sigmoid(at::tanh(at::exp(x2 * 2)))).sum().backward();
  expect_equal(x.grad(), x2.grad());
  EXPECT_EQ(outer_runs, 2);  // the outermost stops at the input of `outer`
  EXPECT_EQ(inner_runs, 3);  // first, in `outer` again, for itself
}

TEST(Checkpoint, NoInputRequiresAGradient) {
  auto w = leaf({3, 3}), w2 = leaf({3, 3});
  auto x = random({3, 3}, 3);
  checkpoint([&] { return feed(x, w); }).sum().backward();
  checkpoint([&](const at::Tensor& t) { return feed(t, w); }, x).sum().backward();
  for (int i = 0; i < 2; ++i) feed(x, w2).sum().backward();
  expect_equal(w.grad(), w2.grad());
}

struct Named {
  at::Tensor value;
  std::map<std::string, at::Tensor> more;
  int64_t factor = 1;
};
template <class F>
void visit_tensors(Named& n, F&& f) {
  f(n.value);
  fsdpp::visit_tensors(n.more, f);
}
struct Opaque {
  at::Tensor value;
};

TEST(Checkpoint, ArgumentsAndResultsOfAnyType) {
  auto fn = [](Named n, const std::vector<at::Tensor>& list, std::optional<at::Tensor> maybe, const Opaque& o, std::string_view name, int& calls) {
    EXPECT_EQ(name, "gate");
    EXPECT_FALSE(list[1].defined());
    ++calls;
    n.value = at::tanh(n.value * static_cast<double>(n.factor)) * list[0] * maybe.value() * o.value;
    n.more["sum"] = at::exp(n.more.at("bias"));
    return std::tuple(n, calls);
  };
  auto run = [&](bool recomputes) {
    auto a = leaf({3}, 1), b = leaf({3}, 2), c = leaf({3}, 3), d = leaf({3}, 4), e = leaf({3}, 5);
    int calls = 0;
    Named n{a, {{"bias", e}}, 3};
    std::vector<at::Tensor> list{b, at::Tensor()};
    auto [out, count] = recomputes ? checkpoint(fn, n, list, std::optional(c), Opaque{d}, "gate", calls) : fn(n, list, c, Opaque{d}, "gate", calls);
    EXPECT_EQ(count, 1);
    expect_equal(n.value, a);
    (out.value.sum() + out.more.at("sum").sum()).backward();
    EXPECT_EQ(calls, 1) << "the second run counts in its copy";
    return std::vector{a.grad(), b.grad(), c.grad(), d.grad(), e.grad()};
  };
  auto got = run(true), expected = run(false);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i]);
}

TEST(Checkpoint, OneOfSeveralResultsIsEnoughForBackward) {
  auto fn = [](const at::Tensor& x) { return std::pair(at::tanh(x), at::exp(x)); };
  auto x = leaf({3}), x2 = leaf({3});
  auto [a, b] = checkpoint(fn, x);
  b.sum().backward();
  at::exp(x2).sum().backward();
  expect_equal(x.grad(), x2.grad());
  a.sum().backward();
  at::tanh(x2).sum().backward();
  expect_equal(x.grad(), x2.grad());
}

TEST(Checkpoint, FunctionsWithoutResultOrWithAReference) {
  at::Tensor out;
  auto x = leaf({3});
  checkpoint([&](const at::Tensor& t) { if (!engine::Recomputation::running()) out = at::exp(t); else (void)at::exp(t); }, x);
  out.sum().backward();
  expect_equal(x.grad(), at::exp(x.detach()));
  auto& same = checkpoint([&](at::Tensor& t) -> at::Tensor& { return t; }, x);
  EXPECT_EQ(&same, &x);
}

TEST(Checkpoint, BackwardTwiceAndBackwardOfBackward) {
  auto x = leaf({3, 3}), w = leaf({3, 3}, 2);
  auto gradients = [&](bool recomputes) {
    auto y = recomputes ? checkpoint(feed, x, w) : feed(x, w);
    auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    auto again = torch::autograd::grad({y.sum()}, {x}, {}, true)[0];
    expect_equal(first, again);
    auto second = torch::autograd::grad({(first * first).sum()}, {x, w});
    return std::vector{first, second[0], second[1]};
  };
  auto got = gradients(true), expected = gradients(false);
  for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i]);
}

TEST(Checkpoint, BackwardInsideTheFunction) {
  auto penalty = [](const at::Tensor& x, const at::Tensor& w) {
    auto y = feed(x, w).sum();
    auto g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    return y + at::exp(g).sum();
  };
  for (bool early_stop : {true, false}) {
    auto x = leaf({3, 3}), w = leaf({3, 3}, 2), x2 = leaf({3, 3}), w2 = leaf({3, 3}, 2);
    checkpoint({.early_stop = early_stop}, penalty, x, w).backward();
    penalty(x2, w2).backward();
    expect_equal(x.grad(), x2.grad());
    expect_equal(w.grad(), w2.grad());
  }
}

TEST(Checkpoint, WhatABackwardInsideTheFunctionSavesIsKept) {
  int runs = 0, backwards = 0;
  auto x = leaf({3});
  auto y = checkpoint([&](const at::Tensor& t) {
    ++runs;
    auto square = at::tanh(t).sum();
    ++backwards;
    return torch::autograd::grad({square}, {t}, {}, true, /*create_graph=*/true)[0].sum();
  }, x);
  y.backward();
  EXPECT_EQ(runs, 3) << "again for the backward inside, and for the one outside";
  EXPECT_EQ(backwards, 1) << "both end at tanh's result";
}

TEST(Checkpoint, SecondRunHasTheAutocastOfTheFirst) {
  std::vector<c10::ScalarType> seen;
  auto fn = [&](const at::Tensor& t, const at::Tensor& w) {
    auto h = at::mm(at::mm(t, w), w);
    seen.push_back(h.scalar_type());
    return at::tanh(h.to(at::kFloat));
  };
  auto gradient = [&](bool recomputes) {
    auto x = random({3, 3}, 1), w = leaf({3, 3}, 2);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    auto y = recomputes ? checkpoint(fn, x, w) : fn(x, w);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return w.grad();
  };
  expect_equal(gradient(true), gradient(false));
  EXPECT_THAT(seen, ::testing::ElementsAre(at::kBFloat16, at::kBFloat16, at::kBFloat16));
}

TEST(Checkpoint, WithoutGradModeTheFunctionJustRuns) {
  int runs = 0;
  auto fn = [&](const at::Tensor& x) { return ++runs, at::sigmoid(x); };
  auto x = leaf({3});
  {
    at::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(fn, x).requires_grad());
  }
  {
    c10::InferenceMode inference;
    EXPECT_TRUE(checkpoint(fn, x).is_inference());
  }
  EXPECT_EQ(runs, 2);
}

TEST(Checkpoint, NextStepsInputIsLetGoWithTheGraph) {
  auto w = leaf({3});
  Weak input = watch(w);
  {
    auto x = random({3}, 2);
    input = watch(x);
    auto y = checkpoint([](const at::Tensor& a, const at::Tensor& b) { return at::sigmoid(a * b); }, x, w).sum();
    x.reset();
    EXPECT_FALSE(input.expired());
    y.backward();
    EXPECT_TRUE(input.expired());  // though the loss is alive
  }
}

// -- misuse --------------------------------------------------------------------------------------------------------------

TEST(CheckpointMisuse, AnotherShapeOrDtypeInTheSecondRunIsNamed) {
  auto run = [](auto other) {
    auto x = leaf({2, 3});
    auto y = checkpoint([other](const at::Tensor& t) {
      auto h = at::tanh(t);
      auto a = at::sigmoid(engine::Recomputation::running() ? other(h) : h).sum();
      return a + at::exp(h).sum();
    }, x);
    return usage_error([&] { y.backward(); });
  };
  EXPECT_THAT(run([](const at::Tensor& h) { return h.narrow(1, 0, 2); }),
              AllOf(HasSubstr("tensor 1 of 3"), HasSubstr("Float [2, 3]"), HasSubstr("Float [2, 2]"), HasSubstr("preserve_rng_state")));
  EXPECT_THAT(run([](const at::Tensor& h) { return h.to(at::kDouble); }), HasSubstr("is Double [2, 3] on cpu when it runs"));
  EXPECT_EQ(run([](const at::Tensor& h) { return h; }), "no error");
}

TEST(CheckpointMisuse, FewerOrMoreTensorsInTheSecondRunAreCounted) {
  auto run = [](int first, int second) {
    auto x = leaf({2});
    auto y = checkpoint({.early_stop = false}, [=](const at::Tensor& t) {
      auto h = t;
      for (int i = 0; i < (engine::Recomputation::running() ? second : first); ++i) h = at::tanh(h);
      return h.sum();
    }, x);
    return usage_error([&] { y.backward(); });
  };
  EXPECT_THAT(run(3, 2), AllOf(HasSubstr("saved 2 tensors"), HasSubstr("3 in its first run"), HasSubstr("missing is Float [2]")));
  EXPECT_THAT(run(2, 3), AllOf(HasSubstr("more tensors"), HasSubstr("than the 2 of its first run")));
  EXPECT_EQ(run(2, 2), "no error");
}

TEST(CheckpointMisuse, DifferencesPassWhereTheCheckIsOff) {
  auto x = leaf({2, 3});
  auto y = checkpoint({.determinism_check = false}, [](const at::Tensor& t) {
    auto h = engine::Recomputation::running() ? t.to(at::kDouble) : t;
    return at::exp(h).to(at::kFloat).sum();
  }, x);
  EXPECT_NO_THROW(y.backward());
}

TEST(CheckpointMisuse, ChangingAnInputOrASavedTensorInPlaceIsAnError) {
  auto w = leaf({3});
  auto x = random({3}, 2);
  auto y = checkpoint([&](const at::Tensor& t) { return at::sigmoid(t * w).sum(); }, x);
  x.add_(1);
  EXPECT_ANY_THROW(y.backward());
  auto z = checkpoint({.early_stop = false}, [&](const at::Tensor& t) { auto h = at::sigmoid(t); h.add_(1); return h.sum(); }, w);
  EXPECT_THAT(usage_error([&] { z.backward(); }), HasSubstr("changed in place"));
}

TEST(CheckpointMisuse, ExceptionInTheSecondRunReachesTheCallerOfBackward) {
  auto x = leaf({3});
  bool armed = false;
  auto y = checkpoint([&](const at::Tensor& t) {
    auto h = at::exp(t);
    if (armed) throw std::out_of_range("armed");
    return at::tanh(h).sum();
  }, x);
  armed = true;
  EXPECT_THROW(y.backward({}, true), std::out_of_range);
  armed = false;
  EXPECT_NO_THROW(y.backward());
}

// -- with units ----------------------------------------------------------------------------------------------------------

// Linear, dropout-free block; its forward recomputes its inside if told to.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t dim) {
    scale = register_parameter("scale", at::ones({dim}));
    up = register_module("up", torch::nn::Linear(dim, 15));
    down = register_module("down", torch::nn::Linear(15, dim));
  }
  at::Tensor body(const at::Tensor& x) {
    ++runs;
    return x + down(at::gelu(up(at::layer_norm(x, {x.size(-1)}, scale))));
  }
  at::Tensor forward(const at::Tensor& x) {
    return inside ? checkpoint([this](const at::Tensor& t) { return body(t); }, x) : body(x);
  }
  at::Tensor scale;
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool inside = false;
  int runs = 0;
};
FSDPP_MODULE(Layer);

enum class Where { Nowhere, Inside, Outside, Both, Pairs, All, Nested };

struct StackImpl : torch::nn::Module {
  explicit StackImpl(Where w, int n = 4, int64_t dim = 7) : where(w) {
    first = register_module("first", torch::nn::Linear(dim, dim));
    for (int i = 0; i < n; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Layer(dim)));
      layers.back()->inside = w == Where::Inside || w == Where::Both;
    }
    last = register_module("last", torch::nn::Linear(dim, 3));
  }
  at::Tensor some(size_t from, size_t to, at::Tensor x) {
    for (size_t i = from; i < to; ++i) x = layers[i](x);
    return x;
  }
  at::Tensor part(size_t from, size_t to, const at::Tensor& x) {
    return checkpoint([=, this](const at::Tensor& t) { return some(from, to, t); }, x);
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    size_t n = layers.size();
    if (where == Where::Outside || where == Where::Both)
      for (auto& l : layers) x = checkpoint(l, x);
    else if (where == Where::Pairs)
      for (size_t i = 0; i < n; i += 2) x = part(i, i + 2, x);
    else if (where == Where::All)
      x = part(0, n, x);
    else if (where == Where::Nested)
      x = checkpoint([=, this](const at::Tensor& t) { return part(n / 2, n, part(0, n / 2, t)); }, x);
    else
      x = some(0, n, x);
    return last(x.to(last->weight.scalar_type())).sum();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::vector<Layer> layers;
  Where where;
};
FSDPP_MODULE(Stack);

Stack make_stack(Where where) {
  Stack stack(where);
  fill_parameters(*stack, 3);
  return stack;
}
void shard_stack(Stack& stack, const std::shared_ptr<Mesh>& mesh, const FullyShardOptions& options = {}) {
  for (auto& l : stack->layers) fully_shard(l, mesh, options);
  fully_shard(stack, mesh, options);
}
at::Tensor batch(const std::shared_ptr<World>& world, int step) { return random({5, 7}, 10 + 7 * step + world->rank()); }

void expect_same_shards_of_grads(const torch::nn::Module& a, const torch::nn::Module& b) {
  auto p = a.parameters(), q = b.parameters();
  for (size_t i = 0; i < p.size(); ++i) expect_equal(p[i].grad(), q[i].grad());
}
void expect_sharded(const torch::nn::Module& module) {
  for (auto& u : units(module)) EXPECT_TRUE(u.is_sharded()) << u.name();
}

class CheckpointedUnits : public ::testing::TestWithParam<int> {
 protected:
  static void each_rank(const std::function<void(std::shared_ptr<World>)>& body) { run_local_world(GetParam(), body); }
};

constexpr std::array kEverywhere{Where::Inside, Where::Outside, Where::Both, Where::Pairs, Where::All, Where::Nested};

TEST_P(CheckpointedUnits, GradientsAreBitEqualAndNothingIsGatheredMoreThanWithout) {
  for (auto where : kEverywhere)
    each_rank([&](std::shared_ptr<World> world) {
      Stack plain = make_stack(Where::Nowhere), stack = make_stack(where);
      shard_stack(plain, Mesh::shard(world, "plain")), shard_stack(stack, Mesh::shard(world, "recomputed"));  // own prefetch orders
      for (int step = 0; step < 3; ++step) {
        for (auto* s : {&plain, &stack})
          for (auto u : units(**s)) u.reset_stats();
        auto a = plain(batch(world, step)), b = stack(batch(world, step));
        expect_equal(b, a);
        a.backward(), b.backward();
        expect_same_shards_of_grads(*stack, *plain);
        expect_sharded(*stack);
        for (size_t i = 0; i < stack->layers.size(); ++i) {
          auto& l = stack->layers[i];
          auto stats = unit_of(*l).stats();
          EXPECT_EQ(stats.forward_gathers, 1);
          EXPECT_EQ(stats.backward_gathers, 1) << "where " << static_cast<int>(where) << " step " << step;
          EXPECT_EQ(stats.reduces, 1);
          // The outer of two functions stops at the input of the last one inside it.
          EXPECT_EQ(std::exchange(l->runs, 0), where == Where::Nested && i < 2 ? 3 : 2);
        }
        EXPECT_EQ(unit_of(*stack).stats().gathers, unit_of(*plain).stats().gathers);
      }
    });
}

TEST_P(CheckpointedUnits, PoliciesAndAccumulationAgreeWithThePlainRun) {
  std::vector<FullyShardOptions> policies(3);
  policies[0].reshard_after_forward = false;
  policies[1].mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat};
  policies[2].mp_policy = {.param_dtype = at::kBFloat16};
  if (GetParam() % 2 == 0) policies.emplace_back().reshard_after_forward = 2;
  for (auto& options : policies)
    for (auto where : kEverywhere)
      each_rank([&](std::shared_ptr<World> world) {
        auto mesh = Mesh::shard(world);
        Stack plain = make_stack(Where::Nowhere), stack = make_stack(where);
        shard_stack(plain, mesh, options), shard_stack(stack, mesh, options);
        for (int step = 0; step < 3; ++step) {
          for (auto* s : {&plain, &stack}) {
            unit_of(**s).set_requires_gradient_sync(step != 1);
            (*s)(batch(world, step)).backward();
          }
          expect_same_shards_of_grads(*stack, *plain);
          expect_sharded(*stack);
        }
      });
}

TEST_P(CheckpointedUnits, WholeModelInOneFunction) {
  each_rank([&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Stack plain = make_stack(Where::Nowhere), stack = make_stack(Where::Nowhere);
    shard_stack(plain, mesh), shard_stack(stack, mesh);
    for (int step = 0; step < 2; ++step) {
      auto x = batch(world, step);
      plain(x).backward();
      checkpoint(stack, x).backward();
      expect_same_shards_of_grads(*stack, *plain);
      expect_sharded(*stack);
      for (auto u : units(*stack)) EXPECT_EQ(u.stats().gathers, unit_of(*plain).name() == u.name() ? step + 1 : 2 * (step + 1)) << u.name();
    }
  });
}

// The ranks of this test share the process's generator, so one rank only; recompute_dropout_test has more.
TEST(CheckpointedUnit, DropoutInsideAUnitDrawsTheSameMasks) {
  run_local_world(1, [](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Stack plain = make_stack(Where::Nowhere), stack = make_stack(Where::Nowhere);
    shard_stack(plain, mesh), shard_stack(stack, mesh);
    for (int step = 0; step < 2; ++step) {
      auto run = [&](Stack& s, bool recomputes) {
        at::manual_seed(step);
        auto x = batch(world, step);
        for (auto& l : s->layers) {
          auto fn = [&](const at::Tensor& t) { return at::dropout(l(at::dropout(t, 0.5, true)), 0.5, true); };
          x = recomputes ? checkpoint(fn, x) : fn(x);
        }
        x.sum().backward();
      };
      run(plain, false), run(stack, true);
      expect_same_shards_of_grads(*stack, *plain);
    }
  });
}

TEST_P(CheckpointedUnits, FrozenUnitsInAFunctionAreShardedAfterBackward) {
  each_rank([&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Stack plain = make_stack(Where::Nowhere), stack = make_stack(Where::All);
    for (auto* s : {&plain, &stack})
      for (auto& m : std::vector<std::shared_ptr<torch::nn::Module>>{(*s)->first.ptr(), (*s)->layers[0].ptr(), (*s)->layers[2].ptr()})
        for (auto& p : m->parameters()) p.requires_grad_(false);
    shard_stack(plain, mesh), shard_stack(stack, mesh);
    for (int step = 0; step < 2; ++step) {
      plain(batch(world, step)).backward(), stack(batch(world, step)).backward();
      expect_same_shards_of_grads(*stack, *plain);
      expect_sharded(*stack);
    }
  });
}

TEST_P(CheckpointedUnits, SeveralForwardsThenOneBackwardAndAKeptGraph) {
  for (auto where : kEverywhere)
    each_rank([&](std::shared_ptr<World> world) {
      auto mesh = Mesh::shard(world);
      Stack plain = make_stack(Where::Nowhere), stack = make_stack(where);
      shard_stack(plain, mesh), shard_stack(stack, mesh);
      for (auto* s : {&plain, &stack}) {
        auto loss = (*s)(batch(world, 0)) + (*s)(batch(world, 1));
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
      }
      expect_same_shards_of_grads(*stack, *plain);
      expect_sharded(*stack);
    });
}

TEST_P(CheckpointedUnits, AfterAnExceptionInTheSecondRunTheNextStepIsRight) {
  each_rank([&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Stack plain = make_stack(Where::Nowhere), stack = make_stack(Where::Nowhere);
    shard_stack(plain, mesh), shard_stack(stack, mesh);
    bool armed = true;
    auto loss = [&](Stack& s, bool recomputes) {
      auto fn = [&](at::Tensor x) {
        x = s->some(0, 2, x);
        if (armed && engine::Recomputation::running()) throw std::out_of_range("armed");
        return s->some(2, 4, x);
      };
      auto x = batch(world, 0);
      return recomputes ? checkpoint(fn, x).sum() : fn(x).sum();
    };
    EXPECT_THROW(loss(stack, true).backward(), std::out_of_range);
    armed = false;
    for (auto& p : stack->parameters()) p.mutable_grad() = at::Tensor();
    expect_sharded(*stack);
    loss(stack, true).backward(), loss(plain, false).backward();
    expect_same_shards_of_grads(*stack, *plain);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointedUnits, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace fsdpp::test

// Edges of the engine: odd parameters, tied and frozen ones, exceptions, units that a backward skips or visits twice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kDim = 6;
at::Tensor input() { return at::ones({3, kDim}); }
at::Tensor full_grad(const at::Tensor& p) { return shard::full_tensor(sharding_of(p), p.grad()); }

void expect_same_grads(const torch::nn::Module& sharded, const torch::nn::Module& plain) {
  auto a = sharded.parameters(), b = plain.parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].grad().defined(), b[i].grad().defined()) << "parameter " << i;
    if (!b[i].grad().defined()) continue;
    EXPECT_LT(relative_error(full_grad(a[i]), b[i].grad()), 1e-5) << "parameter " << i;
  }
}
void expect_sharded(const torch::nn::Module& module) {
  for (auto& u : units(module)) EXPECT_TRUE(u.is_sharded()) << u.name();
}

struct MatImpl : torch::nn::Module {
  MatImpl() { w = register_parameter("w", at::eye(kDim) * 0.5); }
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Mat);

using Body = std::function<at::Tensor(at::Tensor)>;

// Recomputes `body` in backward, by a backward inside the backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    at::NoGradGuard no_grad;
    return (*body)(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    at::AutoGradMode grad_mode(true);
    auto y = (*reinterpret_cast<Body*>(context->saved_data["body"].toInt()))(x);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

// Throws in backward while its thread says so.
struct Trap : torch::autograd::Function<Trap> {
  static inline thread_local bool armed = false;
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    if (armed) throw std::runtime_error("trapped");
    return grads;
  }
};

// Matrices one after the other; a trap before the second; the middle `repeats` times, recomputed if `recomputes`.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int n) {
    for (int i = 0; i < n; ++i) mats.push_back(register_module("m" + std::to_string(i), Mat()));
    middle = [this](at::Tensor x) {
      for (size_t i = 1; i + 1 < mats.size(); ++i) x = mats[i](x);
      return x;
    };
  }
  at::Tensor forward(at::Tensor x) {
    x = Trap::apply(mats.front()(x));
    for (int i = 0; i < repeats; ++i) x = recomputes ? Recompute::apply(x, &middle) : middle(x);
    return mats.back()(x);
  }
  std::vector<Mat> mats;
  Body middle;
  int repeats = 1;
  bool recomputes = false;
};
FSDPP_MODULE(Chain);

void shard_chain(Chain& chain, const std::shared_ptr<Mesh>& mesh, const FullyShardOptions& options = {}) {
  for (auto& m : chain->mats) fully_shard(m, mesh, options);
  fully_shard(chain, mesh);
}

class Edges : public ::testing::TestWithParam<int> {
 protected:
  static void each_rank(const std::function<void(std::shared_ptr<World>)>& body) { run_local_world(GetParam(), body); }
};

// -- parameters ----------------------------------------------------------------------------------------------------------

struct OddImpl : torch::nn::Module {
  OddImpl() {
    scalar = register_parameter("scalar", at::full({}, 2.0f));
    wide = register_parameter("wide", at::full({3}, 3.0, at::kDouble));
    empty = register_parameter("empty", at::ones({0, 4}));
  }
  at::Tensor forward(const at::Tensor& x) { return (x * scalar + wide.sum().to(at::kFloat) + empty.sum()).sum(); }
  at::Tensor scalar, wide, empty;
};
FSDPP_MODULE(Odd);

TEST_P(Edges, ScalarsEmptyOnesAndTwoDtypesInOneUnitTrain) {
  each_rank([](std::shared_ptr<World> world) {
    Odd sharded, plain;
    fully_shard(sharded, Mesh::shard(world));
    for (int i = 0; i < 2; ++i) sharded(at::ones({2})).backward(), plain(at::ones({2})).backward();
    expect_same_grads(*sharded, *plain);
    EXPECT_EQ(full_tensor(sharded->scalar).item<float>(), 2.0f);
  });
}

struct EmptyImpl : torch::nn::Module {
  EmptyImpl() { w = register_parameter("w", at::ones({0, 3})); }
  at::Tensor forward(const at::Tensor& x) { return x + w.sum(); }
  at::Tensor w;
};
FSDPP_MODULE(Empty);

TEST_P(Edges, UnitOfEmptyParametersOnlyGetsEmptyGradients) {
  each_rank([](std::shared_ptr<World> world) {
    Empty m;
    fully_shard(m, Mesh::shard(world));
    m(at::ones({2})).sum().backward();
    ASSERT_TRUE(m->w.grad().defined());
    EXPECT_EQ(m->w.grad().sizes(), m->w.sizes());
  });
}

struct NothingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * 2; }
};
FSDPP_MODULE(Nothing);

TEST_P(Edges, UnitWithoutParametersPassesGradientsOn) {
  each_rank([](std::shared_ptr<World> world) {
    Nothing m;
    fully_shard(m, Mesh::shard(world));
    auto x = at::ones({2}).requires_grad_();
    m(x).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0f)));
  });
}

TEST_P(Edges, AnEmptyShardIsNamedInItsError) {
  each_rank([](std::shared_ptr<World> world) {
    auto m = std::make_shared<torch::nn::Module>("pair");
    m->register_parameter("a", at::ones({4, 64}));
    auto b = m->register_parameter("b", at::ones({1}));
    fully_shard(m, Mesh::shard(world));
    try {
      (void)(b * 2);
      ADD_FAILURE() << "expected an error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'b'"));
    }
  });
}

TEST_P(Edges, FullTensorOfAnUnshardedParameterHasItsOriginalDtype) {
  each_rank([](std::shared_ptr<World> world) {
    Mat m;
    fully_shard(m, Mesh::shard(world), {.mp_policy = {.param_dtype = at::kBFloat16}});
    { at::NoGradGuard no_grad; m->w.fill_(1.0f / 3); }
    unit_of(*m).unshard();
    EXPECT_TRUE(at::equal(full_tensor(m->w), at::full({kDim, kDim}, 1.0f / 3)));
  });
}

// -- tied ----------------------------------------------------------------------------------------------------------------

struct TiedHeadImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("no");
    return at::mm(at::mm(x, first), second);
  }
  at::Tensor first, second;
  bool fails = false;
};
FSDPP_MODULE(TiedHead);
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    a = register_module("a", Mat());
    b = register_module("b", Mat());
    head = register_module("head", TiedHead());
    head->first = head->register_parameter("first", a->w);
    head->second = head->register_parameter("second", b->w);
  }
  at::Tensor forward(const at::Tensor& x) { return head(b(a(x))); }
  Mat a{nullptr}, b{nullptr};
  TiedHead head{nullptr};
};
FSDPP_MODULE(Tied);

void shard_tied(Tied& net, const std::shared_ptr<Mesh>& mesh) {
  fully_shard(net->a, mesh);
  fully_shard(net->b, mesh);
  fully_shard(net->head, mesh);
  fully_shard(net, mesh);
}

// Repeated: the order of the owners' gathers must not follow from addresses, which differ between ranks.
TEST_P(Edges, UnitTiedToTwoOthersTrainsAsUnsharded) {
  for (int i = 0; i < 20; ++i)
    each_rank([](std::shared_ptr<World> world) {
      Tied sharded, plain;
      shard_tied(sharded, Mesh::shard(world));
      sharded(input()).sum().backward(), plain(input()).sum().backward();
      expect_same_grads(*sharded, *plain);
      expect_sharded(*sharded);
    });
}

TEST_P(Edges, ExceptionInAForwardShardsTheUnitsItWasTiedTo) {
  each_rank([](std::shared_ptr<World> world) {
    Tied net;
    shard_tied(net, Mesh::shard(world));
    net->head->fails = true;
    EXPECT_THROW((void)net(input()), std::runtime_error);
    expect_sharded(*net);
  });
}

// -- frozen --------------------------------------------------------------------------------------------------------------

TEST_P(Edges, FrozenUnitsGiveTheirMemoryBackDuringBackward) {
  each_rank([](std::shared_ptr<World> world) {
    Chain chain(8);
    for (size_t i = 1; i < chain->mats.size(); ++i) chain->mats[i]->w.requires_grad_(false);
    shard_chain(chain, Mesh::shard(world));
    for (int i = 0; i < 2; ++i) chain(input()).sum().backward();
    auto formula = memory_formula(*chain);
    EXPECT_LE(reserved_buffer_bytes(*chain), formula.gathered + formula.gradients);
  });
}

TEST(EdgesOnTwoRanks, ParameterFrozenOnOneRankOnlyIsAnErrorOnEveryRank) {
  comm::LocalWorldOptions options;
  options.collective_timeout = std::chrono::seconds(10);
  EXPECT_THROW(run_local_world(
                   2,
                   [](std::shared_ptr<World> world) {
                     Chain chain(2);
                     if (world->rank() == 1) chain->mats[0]->w.requires_grad_(false);
                     shard_chain(chain, Mesh::shard(world));
                     EXPECT_THROW((void)chain(input()), UsageError);
                     throw UsageError("reached");
                   },
                   options),
               UsageError);
}

// -- memory --------------------------------------------------------------------------------------------------------------

struct DeepImpl : torch::nn::Module {
  DeepImpl() { w = register_parameter("w", at::eye(kDim)); }
  at::Tensor forward(const at::Tensor& x) { return at::mm(inner ? inner(at::mm(x, w)) : at::mm(x, w), w); }
  at::Tensor w;
  Body inner;
};
FSDPP_MODULE(Deep);

TEST_P(Edges, NestedUnitsOfOneSizeStayWithinTheFormula) {
  each_rank([](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    std::vector<Deep> nest(5);
    for (size_t i = nest.size() - 1; i > 0; --i) {
      nest[i - 1]->register_module("inner", nest[i]);
      nest[i - 1]->inner = [m = nest[i]](at::Tensor x) mutable { return m(x); };
      fully_shard(nest[i], mesh);
    }
    fully_shard(nest[0], mesh);
    auto formula = memory_formula(*nest[0]);
    for (int i = 0; i < 2; ++i) nest[0](input()).sum().backward();
    EXPECT_LE(reserved_buffer_bytes(*nest[0]), formula.gathered + formula.gradients);
  });
}

TEST_P(Edges, UnitsKeptForBackwardStayWithinTheFormula) {
  each_rank([](std::shared_ptr<World> world) {
    Chain chain(6);
    shard_chain(chain, Mesh::shard(world), {.reshard_after_forward = false});
    chain(input()).sum().backward();
    auto formula = memory_formula(*chain);
    EXPECT_LE(reserved_buffer_bytes(*chain), formula.gathered + formula.gradients);
  });
}

// -- backward ------------------------------------------------------------------------------------------------------------

TEST_P(Edges, AfterAnExceptionInBackwardTheNextStepIsRight) {
  each_rank([](std::shared_ptr<World> world) {
    Chain sharded(5), plain(5);
    shard_chain(sharded, Mesh::shard(world));
    sharded(input()).sum().backward();
    Trap::armed = true;
    EXPECT_ANY_THROW(sharded(input()).sum().backward());
    Trap::armed = false;
    for (auto& p : sharded->parameters()) p.mutable_grad() = at::Tensor();
    sharded(input()).sum().backward(), plain(input()).sum().backward();
    expect_same_grads(*sharded, *plain);
    expect_sharded(*sharded);
  });
}

TEST_P(Edges, RecomputationInsideBackwardEqualsPlainTraining) {
  for (int repeats : {1, 3})
    each_rank([&](std::shared_ptr<World> world) {
      Chain sharded(3), plain(3);
      sharded->recomputes = true;
      sharded->repeats = plain->repeats = repeats;
      shard_chain(sharded, Mesh::shard(world));
      for (int i = 0; i < 2; ++i) sharded(input()).sum().backward(), plain(input()).sum().backward();
      expect_same_grads(*sharded, *plain);
      expect_sharded(*sharded);
    });
}

TEST_P(Edges, GradientsKeptWithoutSyncAreReducedThoughTheLastBackwardSkipsTheirUnit) {
  each_rank([](std::shared_ptr<World> world) {
    Chain sharded(3), plain(3);
    shard_chain(sharded, Mesh::shard(world));
    auto root = unit_of(*sharded);
    root.set_requires_gradient_sync(false);
    sharded(input()).sum().backward(), plain(input()).sum().backward();
    root.set_requires_gradient_sync(true);
    call_as(*sharded, [&](const at::Tensor& x) { return sharded->mats[0](x); }, input()).sum().backward();
    plain->mats[0](input()).sum().backward();
    expect_same_grads(*sharded, *plain);
  });
}

// -- names and switches --------------------------------------------------------------------------------------------------

TEST_P(Edges, CallingASubmoduleAloneChangesNeitherItsNameNorItsResharding) {
  each_rank([](std::shared_ptr<World> world) {
    Chain chain(3);
    shard_chain(chain, Mesh::shard(world));
    chain(input()).sum().backward();
    chain->mats[1](input()).sum().backward();
    EXPECT_EQ(unit_of(*chain->mats[1]).name(), "m1");
    auto kept = chain(input());
    EXPECT_TRUE(unit_of(*chain->mats[1]).is_sharded());
  });
}

TEST_P(Edges, SwitchesReachTheUnitsBelowEveryModuleOfAUnit) {
  each_rank([](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    Mat first;
    Chain second(2);
    for (auto& m : second->mats) fully_shard(m, mesh);
    fully_shard({first.ptr(), second.ptr()}, mesh).set_requires_gradient_sync(false);
    second->mats[0](input()).sum().backward();
    EXPECT_FALSE(second->mats[0]->w.grad().defined());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Edges, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdpp::test

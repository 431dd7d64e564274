// Orders of forward and backward that people use: values as in plain training, units sharded afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "support/event_log.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using comm::Mesh;
using comm::run_local_world;
using comm::World;
using ::testing::ElementsAre;

// w2 · w1 · x with each weight a unit.
struct MatImpl : torch::nn::Module {
  explicit MatImpl(at::Tensor value) { w = register_parameter("w", std::move(value)); }
  at::Tensor forward(const at::Tensor& x) { return at::mv(w, x); }
  at::Tensor w;
};
FSDPP_MODULE(Mat);
struct PairImpl : torch::nn::Module {
  PairImpl() {
    first = register_module("first", Mat(at::eye(2)));
    second = register_module("second", Mat(at::eye(2)));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Mat first{nullptr}, second{nullptr};
};
FSDPP_MODULE(Pair);

struct Vec : torch::nn::Module {
  explicit Vec(int64_t n, c10::ScalarType dtype = at::kFloat) { w = register_parameter("w", at::ones({n}, dtype)); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};

class Lifecycle : public ::testing::TestWithParam<int> {
 protected:
  static void each_rank(const std::function<void(std::shared_ptr<World>)>& body) { run_local_world(GetParam(), body); }
  static double mean_weight() { return (GetParam() + 1) / 2.0; }  // mean of r + 1
};

at::Tensor full_grad(const at::Tensor& p) { return shard::full_tensor(sharding_of(p), p.grad()); }

void expect_all(const at::Tensor& t, double value) {
  EXPECT_TRUE(at::allclose(t, at::full_like(t, value), 1e-6, 1e-6)) << t << " expected " << value;
}

TEST_P(Lifecycle, TwoForwardsThenTwoBackwardsInEitherOrderOrAsOne) {
  for (int order = 0; order < 3; ++order)
    each_rank([&](std::shared_ptr<World> world) {
      auto mesh = Mesh::shard(world);
      Pair pair;
      for (auto& m : {pair->first, pair->second}) fully_shard(m, mesh);
      fully_shard(pair, mesh);
      double k = world->rank() + 1;
      auto a = pair(at::tensor({k, 0.0}).to(at::kFloat)).sum(), b = pair(at::tensor({0.0, k}).to(at::kFloat)).sum();
      if (order == 0) a.backward(), b.backward();
      if (order == 1) b.backward(), a.backward();
      if (order == 2) (a + b).backward();
      for (auto& u : units(*pair)) EXPECT_TRUE(u.is_sharded());
      for (auto& p : pair->parameters()) expect_all(full_grad(p), mean_weight());
    });
}

TEST_P(Lifecycle, EvaluationBetweenStepsSeesTheNewWeights) {
  for (bool reshard : {false, true})
    each_rank([&](std::shared_ptr<World> world) {
      auto m = std::make_shared<Vec>(4);
      FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, .reshard_after_forward = reshard};
      auto unit = fully_shard(m, Mesh::shard(world), options);
      torch::optim::SGD sgd(m->parameters(), torch::optim::SGDOptions(0.5));
      double expected = 1;
      auto step = [&] {
        sgd.zero_grad();
        (call(*m) * (world->rank() + 1)).backward();
        sgd.step();
        expected -= 0.5 * mean_weight();
      };
      auto eval = [&] {
        at::NoGradGuard no_grad;
        return call(*m).item<double>();
      };
      step();
      expect_all(full_tensor(m->w), expected);
      EXPECT_EQ(eval(), 4 * at::scalar_tensor(expected).to(at::kBFloat16).item<double>());
      step();
      expect_all(full_tensor(m->w), expected);
      EXPECT_EQ(eval(), 4 * at::scalar_tensor(expected).to(at::kBFloat16).item<double>());
      sgd.zero_grad();
      (void)(call(*m) * 1.0);  // a training forward without backward
      (void)eval();
      (call(*m) * (world->rank() + 1)).backward();
      expect_all(full_grad(m->w), mean_weight());
    });
}

// The loss does not use what forward returned, so no output hook fires.
struct AsideImpl : torch::nn::Module {
  AsideImpl() {
    w1 = register_parameter("w1", at::eye(2));
    w2 = register_parameter("w2", at::eye(2));
  }
  at::Tensor forward(const at::Tensor& x) {
    kept = at::mv(w1, x);
    return at::mv(w2, kept);
  }
  at::Tensor w1, w2, kept;
};
FSDPP_MODULE(Aside);

TEST_P(Lifecycle, LossFromATensorThatForwardKeptAside) {
  for (auto dtype : {std::optional<c10::ScalarType>{}, std::optional<c10::ScalarType>{at::kBFloat16}})
    each_rank([&](std::shared_ptr<World> world) {
      Aside m;
      auto unit = fully_shard(m, Mesh::shard(world), {.mp_policy = {.param_dtype = dtype, .reduce_dtype = at::kFloat}, .reshard_after_forward = true});
      for (int step = 0; step < 2; ++step) {
        auto x = (at::tensor({1.0, 2.0}).to(at::kFloat) * (world->rank() + 1)).requires_grad_();
        (void)m(x);
        m->kept.sum().backward();
        EXPECT_TRUE(at::equal(x.grad(), at::ones({2})));
      }
      auto k = 2 * mean_weight();
      EXPECT_TRUE(at::equal(full_grad(m->w1), at::tensor({k, 2 * k, k, 2 * k}).to(at::kFloat).view({2, 2})));
      EXPECT_FALSE(m->w2.grad().defined());
      EXPECT_TRUE(unit.is_sharded());
    });
}

struct FrozenFirstImpl : torch::nn::Module {
  FrozenFirstImpl() {
    first = register_module("first", torch::nn::Linear(3, 3));
    head = register_module("head", torch::nn::Linear(3, 2));
    for (auto& p : first->parameters()) p.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) { return head(first(x)).sum(); }
  Hooked<torch::nn::Linear> first{nullptr}, head{nullptr};
};
FSDPP_MODULE(FrozenFirst);

// Nothing that a gradient decides: ranks may use different parameters, and must go on gathering the same units.
TEST_P(Lifecycle, UnitKeptAfterBackwardThoughItHasNoGradientOfItsOwn) {
  each_rank([&](std::shared_ptr<World> world) {
    FrozenFirst m;
    auto mesh = Mesh::shard(world);
    auto first = fully_shard(m->first, mesh, {.reshard_after_forward = false}), root = fully_shard(m, mesh);
    first.set_reshard_after_backward(false);
    for (int step = 0; step < 3; ++step) {
      m(at::ones({2, 3}).requires_grad_()).backward();
      EXPECT_FALSE(first.is_sharded()) << step;
      EXPECT_TRUE(root.is_sharded()) << step;
    }
    EXPECT_EQ(first.stats().forward_gathers, 1);
    EXPECT_EQ(first.stats().backward_gathers, 0);
  });
}

TEST_P(Lifecycle, BackwardTwiceOverAKeptGraphAddsUp) {
  each_rank([&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Vec>(4);
    fully_shard(m, Mesh::shard(world));
    auto loss = call(*m) * (world->rank() + 1);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_all(full_grad(m->w), 2 * mean_weight());
  });
}

TEST_P(Lifecycle, UnitsThatBackwardDoesNotReachGetNoGradientAndAreSharded) {
  each_rank([&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto a = std::make_shared<Vec>(4), b = std::make_shared<Vec>(4);
    auto ua = fully_shard(a, mesh), ub = fully_shard(b, mesh);
    torch::optim::AdamW adamw({a->w, b->w}, torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    auto before = full_tensor(b->w);
    {
      auto x = call(*a), y = call(*b);
      (x * (world->rank() + 1)).backward();
      EXPECT_FALSE(ub.is_sharded());  // y may still be asked for
    }
    adamw.step();
    EXPECT_FALSE(b->w.grad().defined());
    EXPECT_TRUE(at::equal(full_tensor(b->w), before));
    EXPECT_FALSE(at::equal(full_tensor(a->w), before));
    EXPECT_TRUE(ua.is_sharded());
    EXPECT_TRUE(ub.is_sharded());
    adamw.zero_grad();
    auto input = at::ones({1}).requires_grad_();
    (void)call(*a), (void)call(*b);
    input.sum().backward();  // nothing of the model
    EXPECT_TRUE(ua.is_sharded());
    EXPECT_FALSE(a->w.grad().defined());
  });
}

TEST_P(Lifecycle, GradientsThatTheUserKeepsAreNotOverwritten) {
  each_rank([&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Vec>(5);
    fully_shard(m, Mesh::shard(world));
    (call(*m) * 2.0).backward();
    auto kept = m->w.grad();
    m->w.mutable_grad() = at::Tensor();
    (call(*m) * 3.0).backward();
    EXPECT_TRUE(at::equal(kept, at::full_like(kept, 2.0)));
    EXPECT_TRUE(at::equal(m->w.grad(), at::full_like(kept, 3.0)));
  });
}

TEST_P(Lifecycle, ModelThatIsDroppedGivesItsMemoryBack) {
  each_rank([&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    auto net = make_tiny_net();
    shard_tiny_net(net, mesh);
    auto ids = tokens(world->rank());
    auto loss = token_loss(net(ids), ids);
    loss.backward();
    auto unit = unit_of(*net->blocks[0]);
    net = TinyNet(nullptr);
    loss = at::Tensor();
    EXPECT_THROW((void)unit.stats(), UsageError);
  });
}

// -- units of several modules --------------------------------------------------------------------------------------------

// before · first · between · last, of which `first` and `last` are one unit.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { w = register_parameter("w", at::full({2}, 0.5)); }
  at::Tensor forward(const at::Tensor& x) { return used ? x * w : returns_input ? x : x * 1.0; }
  at::Tensor w;
  bool used = true, returns_input = false;
};
FSDPP_MODULE(Scale);
struct AroundImpl : torch::nn::Module {
  AroundImpl() {
    for (auto [name, scale] : {std::pair{"before", &before}, {"first", &first}, {"between", &between}, {"last", &last}})
      *scale = register_module(name, Scale());
  }
  at::Tensor forward(const at::Tensor& x) { return last(between(first(before(x)))); }
  Scale before{nullptr}, first{nullptr}, between{nullptr}, last{nullptr};
};
FSDPP_MODULE(Around);

UnitHandle shard_around(Around& model, const std::shared_ptr<Mesh>& mesh) {
  for (auto& m : {model->before, model->between}) fully_shard(m, mesh);
  auto both = fully_shard({model->first.ptr(), model->last.ptr()}, mesh);
  fully_shard(model, mesh);
  return both;
}

void expect_one_gather_each_way(const UnitHandle& unit, int64_t steps) {
  EXPECT_EQ(unit.stats().forward_gathers, steps);
  EXPECT_EQ(unit.stats().backward_gathers, steps);
  EXPECT_TRUE(unit.is_sharded());
}

TEST_P(Lifecycle, UnitWhoseFirstModuleHasNoGradientIsGatheredOnceForBackward) {
  enum class First { Unused, ReturnsItsInput, UsedOnRank0, Frozen, FrozenAsIsLast };
  for (auto first : {First::Unused, First::ReturnsItsInput, First::UsedOnRank0, First::Frozen, First::FrozenAsIsLast})
    each_rank([&](std::shared_ptr<World> world) {
      SCOPED_TRACE(static_cast<int>(first));
      Around m;
      m->first->used = first >= First::Frozen || (first == First::UsedOnRank0 && world->rank() == 0);
      m->first->returns_input = first != First::Unused;
      m->first->w.requires_grad_(first < First::Frozen);
      m->last->w.requires_grad_(first != First::FrozenAsIsLast);
      auto both = shard_around(m, Mesh::shard(world));
      unit_of(*m).set_reduce_scatter_unused_params(first == First::UsedOnRank0);
      for (int step = 0; step < 2; ++step) m(at::ones({2})).sum().backward();
      expect_one_gather_each_way(both, 2);
      double later = first < First::UsedOnRank0 ? 0.25 : first != First::UsedOnRank0 ? 0.125 : (0.125 + (GetParam() - 1) * 0.25) / GetParam();
      expect_all(full_grad(m->before->w), 2 * later);
    });
}

// With a module in it that no gradient marks as done, the memory is given back when backward reaches what ran before.
TEST_P(Lifecycle, UnitOfSeveralModulesIsShardedWithTheFirstOfThemOrBeforeTheNextUnit) {
  for (bool used : {true, false})
    each_rank([&](std::shared_ptr<World> world) {
      Around m;
      m->first->used = used;
      auto both = shard_around(m, Mesh::shard(world));
      auto loss = m(at::ones({2})).sum();
      EventLog log;
      loss.backward();
      auto events = log.take_without({"unshard", "post_backward between", "reshard between", "reshard before"});
      auto mine = used ? ElementsAre("reshard first", "post_backward first", "post_backward before")
                       : ElementsAre("post_backward first", "reshard first", "post_backward before");
      EXPECT_THAT(events, mine);
      expect_one_gather_each_way(both, 1);
    });
}

TEST_P(Lifecycle, UnitOfSeveralModulesPrefetchesItsListOnceAForward) {
  each_rank([](std::shared_ptr<World> world) {
    Around m;
    auto both = shard_around(m, Mesh::shard(world));
    auto between = unit_of(*m->between);
    both.set_modules_to_forward_prefetch({between});
    for (int step = 0; step < 2; ++step) m(at::ones({2})).sum().backward();
    expect_one_gather_each_way(between, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Lifecycle, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdpp::test

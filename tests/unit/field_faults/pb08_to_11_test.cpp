// PB-08 … PB-11: orders of forward and backward that sharding must not change.
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

at::Tensor floats(const std::vector<double>& values) { return at::tensor(values).to(at::kFloat); }

// -- PB-08: two forwards, then two backwards -------------------------------------------------------------------------

/// W2 · W1 · x, both I₂; each layer a unit, and the root.
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    first = register_module("first", Matrix(at::eye(2)));
    second = register_module("second", Matrix(at::eye(2)));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Matrix first{nullptr}, second{nullptr};
};
FSDPP_MODULE(TwoLayers);

enum class Order { FirstThenSecond, SecondThenFirst, Sum };

class TwoForwards : public ::testing::TestWithParam<std::tuple<int, Order>> {};

TEST_P(TwoForwards, PB08_ThenTheirBackwardsGiveTheGradientOfBoth) {
  const auto [ranks, order] = GetParam();
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    TwoLayers model;
    fully_shard(model->first, mesh), fully_shard(model->second, mesh);
    fully_shard(model, mesh);
    const double k = world->rank() + 1;
    for (int repeat = 1; repeat <= 2; ++repeat) {  // the second time the order of the first is known and gathered ahead
      auto f1 = model(floats({k, 0})).sum(), f2 = model(floats({0, k})).sum();
      if (order == Order::Sum) {
        (f1 + f2).backward();
      } else {
        if (order == Order::SecondThenFirst) std::swap(f1, f2);
        f1.backward();
        EXPECT_TRUE(nothing_unsharded(*model)) << "between the backwards";
        f2.backward();
      }
      EXPECT_TRUE(nothing_unsharded(*model));
      for (auto& p : model->parameters()) {
        EXPECT_TRUE(all_equal(full_grad(p), mean_weight(ranks)));
        p.mutable_grad() = at::Tensor();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TwoForwards,
                         ::testing::Combine(::testing::Values(2, 1),
                                            ::testing::Values(Order::FirstThenSecond, Order::SecondThenFirst, Order::Sum)));

// -- PB-09: evaluation between training steps ------------------------------------------------------------------------

class EvaluationBetweenSteps : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(EvaluationBetweenSteps, PB09_SeesTheNewestWeights) {
  const auto [ranks, reshard] = GetParam();
  const std::vector<double> weights = ranks == 2 ? std::vector{0.25, -0.5} : std::vector{0.5, 0.0};
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    Sum model(at::ones({4}));
    fully_shard(model, Mesh::shard(world),
                {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}, .reshard_after_forward = reshard});
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.5));
    auto train_forward = [&] { return model() * (world->rank() + 1); };
    auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      return model().item<double>();
    };
    for (double expected : weights) {
      sgd.zero_grad();
      train_forward().backward();
      EXPECT_TRUE(nothing_unsharded(*model));
      sgd.step();
      EXPECT_TRUE(all_equal(full_tensor(model->w), expected));
      EXPECT_EQ(evaluate(), 4 * expected);
    }
    sgd.zero_grad();
    auto never_used = train_forward();
    EXPECT_EQ(evaluate(), 4 * weights.back());
    train_forward().backward();
    never_used = at::Tensor();
    EXPECT_TRUE(nothing_unsharded(*model));
    EXPECT_TRUE(all_equal(full_grad(model->w), mean_weight(ranks)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, EvaluationBetweenSteps, ::testing::Combine(::testing::Values(2, 1), ::testing::Bool()));

// -- PB-10: a loss from a tensor that the forward kept aside ---------------------------------------------------------

/// A result with h among other tensors.
struct Parts {
  at::Tensor out, h, twice, ones;
};
template <class F>
void visit_tensors(Parts& parts, F&& f) {
  f(parts.out), f(parts.h), f(parts.twice), f(parts.ones);
}

struct KeepsAsideImpl : torch::nn::Module {
  KeepsAsideImpl() {
    w1 = register_parameter("w1", at::eye(2));
    w2 = register_parameter("w2", at::eye(2));
  }
  at::Tensor forward(const at::Tensor& x) {
    h = at::mv(w1, x);
    return at::mv(w2, h);
  }
  Parts forward_parts(const at::Tensor& x) {
    auto inner = at::mv(w1, x);
    return {at::mv(w2, inner), inner, inner * 2, at::ones({2})};
  }
  at::Tensor w1, w2, h;
};
FSDPP_MODULE(KeepsAside);

enum class KeptWhere { Member, Struct };

class KeptAside : public ::testing::TestWithParam<std::tuple<int, KeptWhere>> {};

TEST_P(KeptAside, PB10_TensorAsTheLossTrainsWhatMadeIt) {
  const auto [ranks, where] = GetParam();
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    KeepsAside model;
    fully_shard(model, Mesh::shard(world), {.reshard_after_forward = true});
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
    auto loss_on = [&](const at::Tensor& x) {
      auto forward_parts = [&](const at::Tensor& in) { return model->forward_parts(in); };
      if (where == KeptWhere::Struct) return call_as(*model, forward_parts, x).h.sum();
      (void)model(x);
      return std::exchange(model->h, at::Tensor()).sum();
    };
    auto x = (floats({1, 2}) * (world->rank() + 1)).requires_grad_();
    auto loss = loss_on(x);
    EXPECT_TRUE(nothing_unsharded(*model)) << "resharded after forward";
    loss.backward();
    EXPECT_TRUE(nothing_unsharded(*model));
    EXPECT_TRUE(all_equal(x.grad(), 1));
    const double k = mean_weight(ranks);  // [[1.5,3],[1.5,3]] on two ranks
    EXPECT_TRUE(same_values(full_grad(model->w1), floats({k, 2 * k, k, 2 * k}).view({2, 2})));
    EXPECT_FALSE(model->w2.grad().defined());
    sgd.step();
    EXPECT_TRUE(same_values(full_tensor(model->w2), at::eye(2)));
    EXPECT_TRUE(all_near(full_tensor(model->w1), at::eye(2) - 0.1 * floats({k, 2 * k, k, 2 * k}).view({2, 2})));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, KeptAside,
                         ::testing::Combine(::testing::Values(2, 1), ::testing::Values(KeptWhere::Member, KeptWhere::Struct)));

// -- PB-11: backward twice, and through a gradient -------------------------------------------------------------------

class BackwardAgain : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static FullyShardOptions options() { return {.reshard_after_forward = std::get<1>(GetParam())}; }
};

TEST_P(BackwardAgain, PB11_OverAKeptGraphAddsTheGradientTwice) {
  each_rank(ranks(), [&](std::shared_ptr<World> world) {
    Sum model(at::ones({4}));
    fully_shard(model, Mesh::shard(world), options());
    auto loss = model() * (world->rank() + 1);
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(nothing_unsharded(*model));
    loss.backward();
    EXPECT_TRUE(nothing_unsharded(*model));
    EXPECT_TRUE(all_equal(full_grad(model->w), 2 * mean_weight(ranks())));
  });
}

/// sum(w² · x): its second backward reads w again.
struct SquareImpl : torch::nn::Module {
  SquareImpl() { w = register_parameter("w", at::ones({4})); }
  at::Tensor forward(const at::Tensor& x) { return (w * w * x).sum(); }
  at::Tensor w;
};
FSDPP_MODULE(Square);

TEST_P(BackwardAgain, PB11_ThroughAGradientGivesTheSecondOrderOne) {
  each_rank(ranks(), [&](std::shared_ptr<World> world) {
    Square model;
    fully_shard(model, Mesh::shard(world), options());
    for (int repeat = 0; repeat < 2; ++repeat) {
      auto x = at::ones({4}).requires_grad_();
      auto g = torch::autograd::grad({model(x)}, {x}, {}, /*retain_graph=*/std::nullopt, /*create_graph=*/true)[0];
      EXPECT_TRUE(all_equal(g, 1));
      EXPECT_FALSE(model->w.grad().defined());
      g.sum().backward();
      EXPECT_TRUE(nothing_unsharded(*model));
      EXPECT_TRUE(all_equal(full_grad(model->w), 2));
      model->w.mutable_grad() = at::Tensor();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackwardAgain, ::testing::Combine(::testing::Values(2, 1), ::testing::Bool()));

}  // namespace
}  // namespace fsdpp::test

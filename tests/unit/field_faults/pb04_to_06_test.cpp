// PB-04 … PB-06: tied, frozen and unused parameters.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdpp/optim/adamw.h"
#include "unit/field_faults/wires.h"

namespace fsdpp::test {
namespace {

std::vector<at::Tensor> handles_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> handles;
  for (auto& p : sharded_parameters(model)) handles.push_back(p.handle);
  return handles;
}

// -- PB-04: one weight in two modules --------------------------------------------------------------------------------

struct TableImpl : torch::nn::Module {
  explicit TableImpl(float value) { weight = register_parameter("weight", at::full({5, 2}, value)); }
  at::Tensor forward(const at::Tensor& ids) { return at::embedding(weight, ids); }
  at::Tensor weight;
};
FSDPP_MODULE(Table);
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const at::Tensor& tied) { weight = register_parameter("weight", tied); }
  at::Tensor forward(const at::Tensor& h) { return at::linear(h, weight); }
  at::Tensor weight;
};
FSDPP_MODULE(Head);
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(float value = 1) {
    table = register_module("table", Table(value));
    head = register_module("head", Head(table->weight));
  }
  at::Tensor forward(const at::Tensor& ids) { return head(table(ids)); }
  Table table{nullptr};
  Head head{nullptr};
};
FSDPP_MODULE(Tied);

enum class TiedGrouping { BothInOneUnit, RootOnly, TwoUnits, TableUnitHeadInRoot };

Tied sharded_tied(const std::shared_ptr<World>& world, TiedGrouping grouping, float value = 1) {
  auto mesh = Mesh::shard(world);
  Tied model(value);
  if (grouping == TiedGrouping::BothInOneUnit) fully_shard({model->table.ptr(), model->head.ptr()}, mesh);
  if (grouping == TiedGrouping::TwoUnits) fully_shard(model->table, mesh), fully_shard(model->head, mesh);
  if (grouping == TiedGrouping::TableUnitHeadInRoot) fully_shard(model->table, mesh);
  fully_shard(model, mesh);
  return model;
}

void expect_one_weight(const Tied& model) {
  const auto listed = sharded_parameters(*model);
  ASSERT_EQ(listed.size(), 1U);
  EXPECT_EQ(listed[0].numel(), 10);
  size_t managed = 0;
  for (auto& u : units(*model)) managed += u.parameters().size();
  EXPECT_EQ(managed, 1U);
  EXPECT_TRUE(model->table->weight.is_same(model->head->weight));
}

void tied_step(Tied& model, torch::optim::Optimizer& optimizer, double expected) {
  optimizer.zero_grad();
  model(at::arange(5)).sum().backward();
  EXPECT_TRUE(nothing_unsharded(*model));
  optimizer.step();
  expect_one_weight(model);
  EXPECT_TRUE(all_near(full_tensor(model->table->weight), expected));
  EXPECT_TRUE(all_near(full_tensor(model->head->weight), expected));
}

class TiedWeight : public ::testing::TestWithParam<std::tuple<int, TiedGrouping, Wire>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static TiedGrouping grouping() { return std::get<1>(GetParam()); }
  static void each_rank(const RankBody& body) { each_rank_on(std::get<2>(GetParam()), ranks(), body); }
};

TEST_P(TiedWeight, PB04_BothUsesCountOnceInEveryRow) {
  const TempFolder folder;
  each_rank([&](std::shared_ptr<World> world) {
    auto model = sharded_tied(world, grouping());
    expect_one_weight(model);
    torch::optim::SGD sgd(handles_of(*model), torch::optim::SGDOptions(0.01));
    tied_step(model, sgd, 0.9);
    tied_step(model, sgd, 0.81);
    full_state::save_full(*model, folder.file("model"));
  });
  each_rank([&](std::shared_ptr<World> world) {
    auto model = sharded_tied(world, grouping(), 3);
    full_state::load_full(*model, folder.file("model"));
    expect_one_weight(model);
    EXPECT_TRUE(all_near(full_tensor(model->head->weight), 0.81));
    torch::optim::SGD sgd(handles_of(*model), torch::optim::SGDOptions(0.01));
    tied_step(model, sgd, 0.81 - 0.01 * 10 * 0.81);
  });
}

TEST_P(TiedWeight, PB04_TheOptimizerHoldsOneCopy) {
  std::atomic<int64_t> state_elements{0};
  each_rank([&](std::shared_ptr<World> world) {
    auto model = sharded_tied(world, grouping());
    optim::AdamW adam(*model, {.lr = 0.1, .weight_decay = 0});
    model(at::arange(5)).sum().backward();
    adam.step();
    EXPECT_TRUE(all_near(full_tensor(model->table->weight), 0.9));  // one move by the learning rate, not two
    EXPECT_EQ(adam.state(model->head->weight).step, 1);
    state_elements += adam.state_bytes() / static_cast<int64_t>(sizeof(float));
  });
  EXPECT_EQ(state_elements, 2 * 10) << "two moments of ten elements, over all ranks";
}

INSTANTIATE_TEST_SUITE_P(Ranks, TiedWeight,
                         ::testing::Combine(::testing::Values(2, 1),
                                            ::testing::Values(TiedGrouping::BothInOneUnit, TiedGrouping::RootOnly,
                                                              TiedGrouping::TwoUnits, TiedGrouping::TableUnitHeadInRoot),
                                            ::testing::Values(Wire::InProcess, Wire::Sockets)));

// -- PB-05: frozen, with an unused input that wants a gradient -------------------------------------------------------

struct LayerImpl : torch::nn::Module {
  LayerImpl() { weight = register_parameter("weight", at::eye(2)); }
  at::Tensor forward(const at::Tensor& a, const at::Tensor& /*unused*/) { return at::mv(weight, a); }
  at::Tensor weight;
};
FSDPP_MODULE(Layer);
struct FrozenFirstImpl : torch::nn::Module {
  FrozenFirstImpl() {
    first = register_module("first", Layer());
    second = register_module("second", Layer());
    first->weight.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& a, const at::Tensor& b) {
    auto z = first(a, b);
    return second(z + b, b);
  }
  Layer first{nullptr}, second{nullptr};
};
FSDPP_MODULE(FrozenFirst);

class FrozenUnit : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(FrozenUnit, PB05_WithAnUnusedInputThatWantsAGradientIsLeftAlone) {
  const int ranks = std::get<0>(GetParam());
  const bool root_is_unit = std::get<1>(GetParam());
  std::atomic<int> reductions{0};
  each_rank(
      ranks,
      [&](std::shared_ptr<World> world) {
        auto mesh = Mesh::shard(world);
        FrozenFirst model;
        auto frozen = fully_shard(model->first, mesh, {.reshard_after_forward = true});
        fully_shard(model->second, mesh, {.reshard_after_forward = true});
        if (root_is_unit) fully_shard(model, mesh, {.reshard_after_forward = true});
        torch::optim::SGD sgd({model->second->weight}, torch::optim::SGDOptions(0.1));
        for (int step = 0; step < 3; ++step) {
          sgd.zero_grad();
          auto a = at::ones({2}), b = at::ones({2}).requires_grad_();
          auto out = model(a, b);
          EXPECT_TRUE(frozen.is_sharded()) << "between forward and backward";
          out.sum().backward();
          EXPECT_TRUE(nothing_unsharded(*model->first));
          EXPECT_TRUE(nothing_unsharded(*model->second));
          EXPECT_TRUE(step > 0 || all_equal(b.grad(), 1));
          EXPECT_FALSE(model->first->weight.grad().defined());
          sgd.step();
        }
        EXPECT_EQ(frozen.stats().reduces, 0);
        EXPECT_TRUE(same_values(full_tensor(model->first->weight), at::eye(2)));
        EXPECT_TRUE(all_near(full_tensor(model->second->weight), at::tensor({0.4, -0.6, -0.6, 0.4}).view({2, 2})));
      },
      count_operations("reduce_scatter", reductions));
  EXPECT_EQ(reductions, ranks == 1 ? 0 : 3 * ranks) << "only those of the trainable layer, one for each step and rank";
}

INSTANTIATE_TEST_SUITE_P(Ranks, FrozenUnit, ::testing::Combine(::testing::Values(2, 1), ::testing::Bool()));

// -- PB-06: some, then none of the parameters ------------------------------------------------------------------------

struct TwoSumsImpl : torch::nn::Module {
  TwoSumsImpl() {
    a = register_module("a", Sum(at::ones({4})));
    b = register_module("b", Sum(at::ones({4})));
  }
  /// What a loss is built of; a caller that drops `b` drops that unit's output.
  struct Output {
    at::Tensor a, b;
    template <class F>
    friend void visit_tensors(Output& o, F&& f) {
      f(o.a), f(o.b);
    }
  };
  Output forward() { return {a(), b()}; }
  Sum a{nullptr}, b{nullptr};
};
FSDPP_MODULE(TwoSums);

/// Step 1 uses a, step 2 both, step 3 neither; `rank_weight` is the loss's factor.
void run_step(TwoSums& model, int step, double rank_weight) {
  auto input = at::ones({1}).requires_grad_();
  auto loss = [&] {
    auto out = model();
    return step == 1 ? out.a * rank_weight : step == 2 ? (out.a + out.b) * rank_weight : input.sum();
  }();
  loss.backward();
  EXPECT_TRUE(step < 3 || all_equal(input.grad(), 1));
}

/// Values after each step of a process without sharding that sees the ranks' mean loss.
template <class Optimizer>
std::vector<std::pair<at::Tensor, at::Tensor>> unsharded_steps(int ranks) {
  TwoSums model;
  Optimizer optimizer(model);
  std::vector<std::pair<at::Tensor, at::Tensor>> after;
  for (int step = 1; step <= 3; ++step) {
    optimizer.zero_grad();
    run_step(model, step, mean_weight(ranks));
    optimizer.step();
    after.emplace_back(model->a->w.detach().clone(), model->b->w.detach().clone());
  }
  return after;
}

struct TorchSgd : torch::optim::SGD {
  explicit TorchSgd(TwoSums& model) : torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1)) {}
};
struct TorchAdamW : torch::optim::AdamW {
  explicit TorchAdamW(TwoSums& model)
      : torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.5)) {}
  bool has_state(const at::Tensor& p) const { return state().find(p.unsafeGetTensorImpl()) != state().end(); }
};
struct FsdppAdamW : optim::AdamW {
  explicit FsdppAdamW(TwoSums& model) : optim::AdamW(*model, {.lr = 0.1, .weight_decay = 0.5}) {}
  bool has_state(const at::Tensor& p) const { return state(p).step > 0; }
};

enum class Root { None, Unit };

/// Three sharded steps; `check(model, optimizer, step)` after each.
template <class Optimizer, class Check>
void sharded_steps(int ranks, Root root, Check check) {
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    auto mesh = Mesh::shard(world);
    TwoSums model;
    fully_shard(model->a, mesh), fully_shard(model->b, mesh);
    if (root == Root::Unit) fully_shard(model, mesh);
    Optimizer optimizer(model);
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      run_step(model, step, world->rank() + 1);
      EXPECT_TRUE(nothing_unsharded(*model)) << "after step " << step;
      optimizer.step();
      check(model, optimizer, step);
    }
  });
}

class UnusedParameters : public ::testing::TestWithParam<std::tuple<int, Root>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static Root root() { return std::get<1>(GetParam()); }
  template <class Optimizer>
  static void expect_adamw_leaves_unused_alone() {
    const auto want = unsharded_steps<TorchAdamW>(ranks());
    sharded_steps<Optimizer>(ranks(), root(), [&](TwoSums& model, Optimizer& optimizer, int step) {
      auto a = full_tensor(model->a->w), b = full_tensor(model->b->w);
      if (step == 1) {
        EXPECT_TRUE(all_equal(b, 1)) << "neither decay nor an update";
        EXPECT_FALSE(optimizer.has_state(model->b->w));
        EXPECT_FALSE(model->b->w.grad().defined());
      }
      EXPECT_TRUE(all_near(a, want[static_cast<size_t>(step - 1)].first)) << "a after step " << step;
      EXPECT_TRUE(all_near(b, want[static_cast<size_t>(step - 1)].second)) << "b after step " << step;
    });
  }
};

TEST_P(UnusedParameters, PB06_SgdMovesWhatTheLossUsed) {
  const double k = 0.1 * mean_weight(ranks());  // 0.15 on two ranks
  const std::vector<double> a{1 - k, 1 - 2 * k, 1 - 2 * k}, b{1, 1 - k, 1 - k};
  EXPECT_NEAR(a[1], ranks() == 2 ? 0.7 : 0.8, 1e-12);
  sharded_steps<TorchSgd>(ranks(), root(), [&](TwoSums& model, TorchSgd&, int step) {
    EXPECT_TRUE(all_near(full_tensor(model->a->w), a[static_cast<size_t>(step - 1)])) << "a after step " << step;
    EXPECT_TRUE(all_near(full_tensor(model->b->w), b[static_cast<size_t>(step - 1)])) << "b after step " << step;
  });
}

TEST_P(UnusedParameters, PB06_TorchAdamWLeavesWhatTheLossDidNotUseAlone) { expect_adamw_leaves_unused_alone<TorchAdamW>(); }
TEST_P(UnusedParameters, PB06_FsdppAdamWLeavesWhatTheLossDidNotUseAlone) { expect_adamw_leaves_unused_alone<FsdppAdamW>(); }

INSTANTIATE_TEST_SUITE_P(Ranks, UnusedParameters,
                         ::testing::Combine(::testing::Values(2, 1), ::testing::Values(Root::None, Root::Unit)));

}  // namespace
}  // namespace fsdpp::test

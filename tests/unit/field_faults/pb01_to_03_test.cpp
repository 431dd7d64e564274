// PB-01 … PB-03: parameters smaller than the number of ranks, without dimensions, and transposed.
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "unit/field_faults/wires.h"

namespace fsdpp::test {
namespace {

// -- PB-01: dim 0 smaller than the number of ranks -------------------------------------------------------------------

enum class Grouping { OneUnit, UnitEach };

/// W [2,3] = 0…5, b [1] = 0, V [5] = 0, each in a module of its own; the result is the sum of all elements.
struct SmallImpl : torch::nn::Module {
  SmallImpl() {
    W = register_module("W", Sum(at::arange(6, at::kFloat).view({2, 3})));
    b = register_module("b", Sum(at::zeros({1})));
    V = register_module("V", Sum(at::zeros({5})));
  }
  at::Tensor forward() { return W() + b() + V(); }
  Sum W{nullptr}, b{nullptr}, V{nullptr};
};
FSDPP_MODULE(Small);

Small sharded_small(const std::shared_ptr<World>& world, Grouping grouping) {
  auto mesh = Mesh::shard(world);
  Small model;
  if (grouping == Grouping::UnitEach)
    for (auto& m : {model->W, model->b, model->V}) fully_shard(m, mesh);
  fully_shard(model, mesh);
  return model;
}

/// The ranks' rows join to the whole, in order and without splitting a row; the local tensors have those rows; a parameter of n
/// rows is spread over n ranks at most, so the others hold an empty tensor.
void expect_rows_cover(const torch::nn::Module& model, int ranks) {
  for (const auto& p : sharded_parameters(model)) {
    int64_t end = 0, holders = 0;
    for (const auto& range : p.ranges) {
      if (range.size() == 0) continue;
      EXPECT_EQ(range.begin, end) << p.name;
      EXPECT_EQ(range.size() % p.row_numel, 0) << p.name;
      end = range.end, ++holders;
    }
    EXPECT_EQ(end, p.numel()) << p.name;
    EXPECT_LE(holders, std::min<int64_t>(ranks, p.global_sizes[0])) << p.name;
    auto local = p.global_sizes;
    local[0] = p.local().size() / p.row_numel;
    EXPECT_EQ(p.handle.sizes(), at::IntArrayRef(local)) << p.name;
  }
}

template <class Optimizer>
void train_small_once(Small& model, int rank, Optimizer& optimizer) {
  (model() * (rank + 1)).backward();
  EXPECT_TRUE(nothing_unsharded(*model));
  for (auto& p : model->parameters()) {
    ASSERT_TRUE(p.grad().defined()) << "also on ranks without a row";
    EXPECT_EQ(p.grad().sizes(), p.sizes());
  }
  optimizer.step();
}

class SmallerThanRanks : public ::testing::TestWithParam<std::tuple<int, Grouping, Wire>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  /// One step on every rank, by which every element moves by `moved` (tolerance 0: bit for bit).
  template <class MakeOptimizer>
  static void expect_moves_by(double moved, double tolerance, MakeOptimizer make) {
    each_rank_on(std::get<2>(GetParam()), ranks(), [&](std::shared_ptr<World> world) {
      auto model = sharded_small(world, std::get<1>(GetParam()));
      expect_rows_cover(*model, ranks());
      auto optimizer = make(*model);
      train_small_once(model, world->rank(), *optimizer);
      for (auto& p : model->parameters()) EXPECT_TRUE(all_equal(full_grad(p), mean_weight(ranks())));
      auto expect = [&](const at::Tensor& p, const at::Tensor& start) {
        auto full = full_tensor(p);
        EXPECT_TRUE(tolerance == 0 ? same_values(full, start + moved) : all_near(full, start + moved));
      };
      expect(model->W->w, at::arange(6, at::kFloat).view({2, 3}));
      expect(model->b->w, at::zeros({1}));
      expect(model->V->w, at::zeros({5}));
      EXPECT_NEAR(optim::grad_norm(*model), ranks() == 4 ? 8.660254 : std::sqrt(12.0) * mean_weight(ranks()), 1e-6);
    });
  }
};

TEST_P(SmallerThanRanks, PB01_SgdMovesEveryElementByTheMeanGradient) {
  expect_moves_by(ranks() == 4 ? -0.25 : -0.1 * mean_weight(ranks()), ranks() == 4 ? 0 : 1e-6, [](Small::Impl& model) {
    return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.1));
  });
}

TEST_P(SmallerThanRanks, PB01_AdamMovesEveryElementByTheLearningRate) {
  expect_moves_by(-0.1, 1e-6, [](Small::Impl& model) {
    return std::make_unique<torch::optim::Adam>(model.parameters(), torch::optim::AdamOptions(0.1).eps(1e-8).weight_decay(0));
  });
}

TEST_P(SmallerThanRanks, PB01_FsdppAdamMovesEveryElementByTheLearningRate) {
  expect_moves_by(-0.1, 1e-6, [](Small::Impl& model) {
    return std::make_unique<optim::AdamW>(model, optim::AdamWOptions{.lr = 0.1, .eps = 1e-8, .weight_decay = 0});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SmallerThanRanks,
                         ::testing::Combine(::testing::Values(4, 3, 1),
                                            ::testing::Values(Grouping::OneUnit, Grouping::UnitEach),
                                            ::testing::Values(Wire::InProcess, Wire::Sockets)));

TEST(FieldFaults, PB01_OnFourRanksAParameterOfOneRowIsOneRanks) {
  each_rank(4, [](std::shared_ptr<World> world) {
    auto model = sharded_small(world, Grouping::OneUnit);
    for (const auto& p : sharded_parameters(*model)) {
      auto holders = std::count_if(p.ranges.begin(), p.ranges.end(), [](auto& r) { return r.size() > 0; });
      EXPECT_TRUE(p.name == "b.w" ? holders == 1 : holders >= 1) << p.name << ": " << holders;
    }
  });
}

// -- PB-02: zero dimensions ------------------------------------------------------------------------------------------

/// One Adam step of lr 0.1 on loss (r + 1) · s. The state goes to files of its own for each rank, the parameter to the full
/// state.
class ScalarJob {
 public:
  ScalarJob(const std::vector<int64_t>& sizes, int ranks) : sizes_(sizes), ranks_(ranks) {}

  void first_run() const {
    each_rank(ranks_, [&](std::shared_ptr<World> world) {
      Sum model(at::full(sizes_, 2.0f));
      fully_shard(model, Mesh::shard(world));
      auto adam = make_adam(*model);
      step(model, *adam, world->rank());
      EXPECT_TRUE(all_near(full_tensor(model->w), 1.9));
      full_state::save_full(*model, folder_.file("model"));
      torch::save(*adam, folder_.file(adam_file(world->rank())));
    });
  }

  void second_run() const {
    each_rank(ranks_, [&](std::shared_ptr<World> world) {
      Sum model(at::full(sizes_, -7.0f));
      fully_shard(model, Mesh::shard(world));
      full_state::load_full(*model, folder_.file("model"));
      auto adam = make_adam(*model);
      torch::load(*adam, folder_.file(adam_file(world->rank())));
      EXPECT_TRUE(all_near(full_tensor(model->w), 1.9));
      step(model, *adam, world->rank());
      auto full = full_tensor(model->w);
      EXPECT_EQ(full.sizes(), at::IntArrayRef(sizes_));
      EXPECT_EQ(sharding_of(model->w).global_sizes, sizes_);
      EXPECT_TRUE(all_near(full, 1.8));
      expect_moments(model->w, *adam);
    });
  }

 private:
  static std::string adam_file(int rank) { return "adam" + std::to_string(rank); }
  static std::unique_ptr<torch::optim::Adam> make_adam(const torch::nn::Module& model) {
    return std::make_unique<torch::optim::Adam>(model.parameters(), torch::optim::AdamOptions(0.1));
  }
  static void step(Sum& model, torch::optim::Adam& adam, int rank) {
    adam.zero_grad();
    (model() * (rank + 1)).backward();
    EXPECT_TRUE(nothing_unsharded(*model));
    adam.step();
  }
  static void expect_moments(const at::Tensor& parameter, const torch::optim::Adam& adam) {
    const auto found = adam.state().find(parameter.unsafeGetTensorImpl());
    ASSERT_NE(found, adam.state().end());
    const auto& state = static_cast<const torch::optim::AdamParamState&>(*found->second);
    EXPECT_EQ(state.step(), 2);
    EXPECT_EQ(state.exp_avg().sizes(), parameter.sizes()) << "the moments have the shape of the local shard";
    EXPECT_EQ(state.exp_avg_sq().sizes(), parameter.sizes());
  }
  std::vector<int64_t> sizes_;
  int ranks_;
  TempFolder folder_;
};

class ZeroDimensions : public ::testing::TestWithParam<int> {};

TEST_P(ZeroDimensions, PB02_AScalarTrainsIsSavedLoadedAndTrainsOn) {
  const ScalarJob job({}, GetParam());
  job.first_run();
  job.second_run();
}

TEST_P(ZeroDimensions, PB02_OneDimensionOfSizeOneGivesTheSame) {
  const ScalarJob job({1}, GetParam());
  job.first_run();
  job.second_run();
}

INSTANTIATE_TEST_SUITE_P(Ranks, ZeroDimensions, ::testing::Values(2, 1));

// -- PB-03: transposed -----------------------------------------------------------------------------------------------

/// W [4,3] with strides (1,4), the transpose of a contiguous [3,4]; y = x · Wᵀ.
struct TransposedImpl : torch::nn::Module {
  explicit TransposedImpl(const at::Tensor& stored) { w = register_parameter("w", stored.t()); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Transposed);

at::Tensor stored() { return at::arange(12, at::kFloat).view({3, 4}); }

class TransposedWeight : public ::testing::TestWithParam<int> {};

TEST_P(TransposedWeight, PB03_IsReadByLogicalIndexThroughTrainingSaveAndLoad) {
  const TempFolder folder;
  const double gradient = mean_weight(GetParam());  // 1.5 on two ranks, 2 on three
  each_rank(GetParam(), [&](std::shared_ptr<World> world) {
    Transposed model(stored());
    ASSERT_EQ(model->w.strides(), at::IntArrayRef({1, 4}));
    fully_shard(model, Mesh::shard(world));
    EXPECT_TRUE(same_values(full_tensor(model->w), stored().t()));
    full_state::save_full(*model, folder.file("model"));
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
    auto y = model(at::full({1, 3}, world->rank() + 1.0f));
    EXPECT_TRUE(same_values(y, at::tensor({12.0f, 15.0f, 18.0f, 21.0f}).view({1, 4}) * (world->rank() + 1)));
    y.sum().backward();
    EXPECT_TRUE(nothing_unsharded(*model));
    EXPECT_TRUE(all_equal(full_grad(model->w), gradient));
    sgd.step();
    EXPECT_TRUE(all_near(full_tensor(model->w), stored().t() - 0.1 * gradient));
  });
  each_rank(GetParam(), [&](std::shared_ptr<World> world) {
    Transposed model(at::full({3, 4}, -1.0f));
    fully_shard(model, Mesh::shard(world));
    full_state::load_full(*model, folder.file("model"));
    EXPECT_TRUE(same_values(full_tensor(model->w), stored().t()));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TransposedWeight, ::testing::Values(2, 3, 1));

}  // namespace
}  // namespace fsdpp::test

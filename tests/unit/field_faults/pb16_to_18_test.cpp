// dtypes: several in one unit, buffers under mixed precision, and averages at the edge of the reduction's dtype.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdpp/base/error.h"
#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

const MixedPrecisionPolicy kBf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

/// The case's tensors are so small that one rank owns all of each; 64 times as long, every rank owns a part.
constexpr int kLengths[] = {1, 64};

struct MixedDtypes : torch::nn::Module {
  explicit MixedDtypes(int length) : length(length) {
    p32 = register_parameter("p32", at::ones({4 * length}));
    p16 = register_parameter("p16", at::ones({4 * length}, at::kBFloat16));
    ids = register_parameter("ids", id_values(), /*requires_grad=*/false);
    flag = register_buffer("flag", flag_values());
  }
  static at::Tensor flag_values() { return at::tensor({1, 0}).to(at::kBool); }
  at::Tensor id_values() const { return at::tensor({int64_t{1} << 40, int64_t{-2}, int64_t{3}}).repeat(length); }
  at::Tensor forward() {
    EXPECT_TRUE(at::equal(ids, id_values()));
    EXPECT_TRUE(at::equal(flag, flag_values()));
    return p32.sum().to(at::kFloat) + p16.to(at::kFloat).sum();
  }
  int64_t length;
  at::Tensor p32, p16, ids, flag;
};

/// The ranks' factors 1 … R; on one rank their mean.
double factor(const World& world, int of_ranks) { return world.size() == 1 ? (of_ranks + 1) / 2.0 : world.rank() + 1; }

void expect_full(const at::Tensor& parameter, const at::Tensor& value) {
  EXPECT_EQ(parameter.scalar_type(), value.scalar_type());
  EXPECT_TRUE(at::equal(full_tensor(parameter), value)) << full_tensor(parameter);
}

TEST(Dtype, PB16_ParametersOfDifferentDtypesInOneUnitTrainAndKeepThem) {
  for (const auto& policy : {MixedPrecisionPolicy{}, kBf16})
    for (auto [ranks, length] : {std::pair{1, 1}, {2, 1}, {2, kLengths[1]}})
      each_rank(ranks, [&, length = length](std::shared_ptr<World> world) {
        auto m = std::make_shared<MixedDtypes>(length);
        fully_shard(m, Mesh::shard(world), {.mp_policy = policy});
        torch::optim::SGD sgd({m->p32, m->p16}, torch::optim::SGDOptions(0.5));
        (call(*m) * factor(*world, 2)).backward();
        for (auto& p : {m->p32, m->p16}) {
          ASSERT_TRUE(p.grad().defined());
          EXPECT_EQ(p.grad().scalar_type(), p.scalar_type());
          EXPECT_TRUE(all_equal(full_grad(p), 1.5));
        }
        EXPECT_FALSE(m->ids.grad().defined());
        sgd.step();
        expect_full(m->p32, at::full({4 * length}, 0.25));
        expect_full(m->p16, at::full({4 * length}, 0.25, at::kBFloat16));
        expect_full(m->ids, m->id_values());
        EXPECT_EQ(m->flag.scalar_type(), at::kBool);
        EXPECT_TRUE(at::equal(m->flag, MixedDtypes::flag_values()));
        EXPECT_TRUE(nothing_unsharded(*m));
      });
}

struct Normed : torch::nn::Module {
  Normed() {
    linear = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3).momentum(0.1)));
    at::NoGradGuard no_grad;
    linear->weight.copy_(at::eye(3));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  Hooked<torch::nn::Linear> linear{nullptr};
  Hooked<torch::nn::BatchNorm1d> norm{nullptr};
};

std::shared_ptr<Normed> sharded_normed(const std::shared_ptr<World>& world, bool own_unit) {
  auto m = std::make_shared<Normed>();
  auto mesh = Mesh::shard(world);
  if (own_unit) {
    fully_shard(m->linear, mesh, {.mp_policy = kBf16});
    fully_shard(m->norm, mesh);
  } else {
    fully_shard(m, mesh, {.mp_policy = kBf16});
  }
  return m;
}

void expect_statistics(Normed& m, const at::Tensor& mean) {
  auto b = m.norm->named_buffers();
  EXPECT_EQ(b["running_mean"].scalar_type(), at::kFloat);
  EXPECT_EQ(b["running_var"].scalar_type(), at::kFloat);
  EXPECT_EQ(b["num_batches_tracked"].scalar_type(), at::kLong);
  EXPECT_TRUE(at::allclose(b["running_mean"], mean, 0, 1e-6)) << b["running_mean"];
  EXPECT_TRUE(at::allclose(b["running_var"], at::full({3}, 1.1), 0, 1e-6)) << b["running_var"];
  EXPECT_EQ(b["num_batches_tracked"].item<int64_t>(), 1);
}

class BatchNormUnits : public ::testing::TestWithParam<bool> {};  // batch norm in a unit of its own, without a policy
INSTANTIATE_TEST_SUITE_P(Units, BatchNormUnits, ::testing::Values(true),
                         [](const auto& info) { return info.param ? "OwnUnit" : "Bf16Unit"; });

// Buffers are each rank's own while training. A checkpoint holds rank 0's (fsdpp/checkpoint/full_state.h), which all ranks load.
TEST_P(BatchNormUnits, PB17_StatisticsStayInTheirDtypesAndRankZerosAreSavedAndLoaded) {
  const TempFolder folder;
  for (int ranks : {1, 2})
    each_rank(ranks, [&](std::shared_ptr<World> world) {
      auto m = sharded_normed(world, GetParam());
      auto x = at::tensor({1.f, 2.f, 3.f, 3.f, 4.f, 5.f}).view({2, 3}) + 10.f * world->rank();
      auto y = GetParam() ? m->forward(x) : call(*m, x);
      y.to(at::kFloat).sum().backward();
      expect_statistics(*m, at::tensor({0.2f, 0.3f, 0.4f}) + 1.f * world->rank());
      EXPECT_EQ(m->norm->bias.grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(m->norm->bias.grad(), at::full_like(m->norm->bias.grad(), 2)));
      EXPECT_EQ(sharded_parameters(*m).size(), 3U) << "buffers are no parameters";

      full_state::save_full(*m, folder.file("saved"));
      auto loaded = sharded_normed(world, GetParam());
      for (auto& b : loaded->buffers()) b.fill_(77 + world->rank());
      full_state::load_full(*loaded, folder.file("saved"));
      expect_statistics(*loaded, at::tensor({0.2f, 0.3f, 0.4f}));
      world->barrier();
    });
}

struct Zeros : torch::nn::Module {
  explicit Zeros(int64_t n) { w = register_parameter("w", at::zeros({n})); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};

/// The whole gradient, from every rank, where rank r's loss is c[r] · sum(w); one rank takes the mean of c.
std::vector<at::Tensor> reduced(const std::vector<double>& c, at::ScalarType reduce_dtype, int ranks, int length) {
  std::vector<at::Tensor> gradients(static_cast<size_t>(ranks));
  each_rank(ranks, [&](std::shared_ptr<World> world) {
    auto m = std::make_shared<Zeros>(4 * length);
    fully_shard(m, Mesh::shard(world), {.mp_policy = {.reduce_dtype = reduce_dtype}});
    (call(*m) * (ranks == 1 ? (c[0] + c[1] + c[2] + c[3]) / 4 : c[world->rank()])).backward();
    EXPECT_EQ(m->w.grad().scalar_type(), at::kFloat);
    gradients[world->rank()] = full_grad(m->w);
  });
  return gradients;
}

TEST(Dtype, PB18_AveragingInHalfPrecisionNeitherOverflowsNorUnderflows) {
  for (int ranks : {1, 4})
    for (int length : kLengths)
      for (double c : {30000.0, std::ldexp(1.0, -23)})
        for (const auto& g : reduced({c, c, c, c}, at::kHalf, ranks, length)) EXPECT_TRUE(all_equal(g, c));
}

TEST(Dtype, PB18_SmallTermsAreKeptAsTheReductionDtypeAllows) {
  for (auto [ranks, length] : {std::pair{1, 1}, {4, 1}, {4, kLengths[1]}}) {
    for (const auto& g : reduced({256, 1, 1, 1}, at::kFloat, ranks, length)) EXPECT_TRUE(all_equal(g, 64.75));
    const auto rounded = reduced({256, 1, 1, 1}, at::kBFloat16, ranks, length);
    for (const auto& g : rounded) {
      EXPECT_TRUE(at::equal(g, rounded[0]));
      EXPECT_TRUE(all_equal(g, g[0].item<float>())) << "the ranks' parts differ";
      EXPECT_GE(g[0].item<float>(), 64);
      EXPECT_LE(g[0].item<float>(), 65);
    }
  }
}

}  // namespace
}  // namespace fsdpp::test

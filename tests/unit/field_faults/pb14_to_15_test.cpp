// Clipping: sharded and replicated gradients together; norms that are not finite, zero, or of nothing.
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>

#include "fsdpp/base/error.h"
#include "fsdpp/optim/clip_grad_norm.h"
#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct SumPair : torch::nn::Module {
  SumPair() {
    w = register_parameter("w", at::ones({8}));
    u = register_parameter("u", at::ones({8}));
  }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w, u;
};

TEST(Clip, PB14_NormCountsShardedAndReplicatedGradientsOnceEach) {
  for (int ranks : {1, 4})
    each_rank(ranks, [](std::shared_ptr<World> world) {
      auto m = std::make_shared<SumPair>();
      fully_shard(m, Mesh::shard(world), {.ignored_params = {m->u}});
      call(*m).backward();
      m->u.mutable_grad() = at::ones({8});
      ASSERT_TRUE(at::equal(m->w.grad(), at::ones_like(m->w.grad())));
      const double norm = optim::clip_grad_norm_(*m, 2.0);
      EXPECT_EQ(norm, 4.0) << "rank " << world->rank();
      EXPECT_TRUE(at::allclose(m->w.grad(), at::full_like(m->w.grad(), 0.5), 0, 1e-6));
      EXPECT_TRUE(at::allclose(m->u.grad(), at::full({8}, 0.5), 0, 1e-6));
      EXPECT_TRUE(nothing_unsharded(*m));
    });
}

TEST(Clip, PB14_NormOnReplicasOfShardsCountsEveryElementOnce) {
  each_rank(4, [](std::shared_ptr<World> world) {
    auto m = std::make_shared<SumPair>();
    m->u.set_requires_grad(false);
    fully_shard(m, Mesh::hybrid(world, 2), {.ignored_params = {m->u}});
    call(*m).backward();
    const double norm = optim::clip_grad_norm_(*m, 2.0);
    EXPECT_NEAR(norm, 2.828427, 1e-6) << "rank " << world->rank();
    EXPECT_TRUE(at::allclose(m->w.grad(), at::full_like(m->w.grad(), 2 / std::sqrt(8.0)), 0, 1e-6));
  });
}

struct Weighted : torch::nn::Module {
  Weighted() { w = register_parameter("w", at::ones({4})); }
  at::Tensor forward(const at::Tensor& a) { return (w * a).sum(); }
  at::Tensor w;
};

/// The gradient 1/2 (a0 + a1) over one or two ranks, then `body(model, the full gradient as of now)`.
void with_gradient(const at::Tensor& a0, const at::Tensor& a1,
                   const std::function<void(Weighted&, const std::function<at::Tensor()>&)>& body) {
  for (int ranks : {1, 2})
    each_rank(ranks, [&](std::shared_ptr<World> world) {
      SCOPED_TRACE("rank " + std::to_string(world->rank()) + " of " + std::to_string(world->size()));
      auto m = std::make_shared<Weighted>();
      fully_shard(m, Mesh::shard(world));
      auto loss = ranks == 1 ? (call(*m, a0) + call(*m, a1)) / 2 : call(*m, world->rank() == 0 ? a0 : a1);
      loss.backward();
      body(*m, [&] { return full_grad(m->w); });
      EXPECT_TRUE(at::equal(full_tensor(m->w), at::ones({4}))) << "clipping changes no parameter";
      EXPECT_TRUE(nothing_unsharded(*m));
    });
}

at::Tensor clipped_by_libtorch(const at::Tensor& gradient, double max_norm) {
  auto w = at::ones({4}).requires_grad_();
  w.mutable_grad() = gradient.clone();
  torch::nn::utils::clip_grad_norm_(w, max_norm);
  return w.grad();
}

TEST(Clip, PB15_NonFiniteNormWithTheSwitchOnRaisesOnEveryRankBeforeAnyChange) {
  for (float bad : {kInf, kNan})
    with_gradient(at::ones({4}), at::tensor({2.f, 2.f, 2.f, bad}), [&](Weighted& m, const auto& gradient) {
      EXPECT_THROW((void)optim::clip_grad_norm_(m, 1.0, 2.0, true), Error);
      EXPECT_TRUE(at::allclose(gradient(), at::tensor({1.5f, 1.5f, 1.5f, bad}), 0, 0, true)) << gradient();
    });
}

TEST(Clip, PB15_InfiniteNormWithTheSwitchOffClipsAsLibTorchDoes) {
  with_gradient(at::ones({4}), at::tensor({2.f, 2.f, 2.f, kInf}), [&](Weighted& m, const auto& gradient) {
    EXPECT_EQ(optim::clip_grad_norm_(m, 1.0), static_cast<double>(kInf));
    EXPECT_TRUE(at::allclose(gradient(), at::tensor({0.f, 0.f, 0.f, kNan}), 0, 0, true)) << gradient();
    EXPECT_TRUE(at::allclose(gradient(), clipped_by_libtorch(at::tensor({1.5f, 1.5f, 1.5f, kInf}), 1.0), 0, 0, true));
  });
}

TEST(Clip, PB15_NanInOneRanksGradientIsTheNormOnEveryRank) {
  with_gradient(at::ones({4}), at::tensor({2.f, 2.f, 2.f, kNan}), [&](Weighted& m, const auto& gradient) {
    EXPECT_TRUE(std::isnan(optim::clip_grad_norm_(m, 1.0)));
    EXPECT_TRUE(at::allclose(gradient(), clipped_by_libtorch(at::tensor({1.5f, 1.5f, 1.5f, kNan}), 1.0), 0, 0, true)) << gradient();
  });
}

TEST(Clip, PB15_ZeroGradientsThenNormAndGradientsExactlyZero) {
  with_gradient(at::zeros({4}), at::zeros({4}), [&](Weighted& m, const auto& gradient) {
    EXPECT_EQ(optim::clip_grad_norm_(m, 1.0, 2.0, true), 0.0);
    EXPECT_TRUE(at::equal(gradient(), at::zeros({4})));
  });
}

TEST(Clip, PB15_NoGradientAtAllThenNormZeroOnEveryRank) {
  for (int ranks : {1, 2})
    each_rank(ranks, [](std::shared_ptr<World> world) {
      auto m = std::make_shared<Weighted>();
      fully_shard(m, Mesh::shard(world));
      EXPECT_EQ(optim::clip_grad_norm_(*m, 1.0, 2.0, true), 0.0);
      (void)call(*m, at::ones({4}));
      EXPECT_EQ(optim::clip_grad_norm_(*m, 1.0, 2.0, true), 0.0);
      EXPECT_FALSE(m->w.grad().defined());
    });
}

}  // namespace
}  // namespace fsdpp::test

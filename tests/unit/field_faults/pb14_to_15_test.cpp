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

/// The case's tensors are so small that one rank owns all of each; 64 times as long, every rank owns a part.
constexpr int kLengths[] = {1, 64};

struct SumPair : torch::nn::Module {
  explicit SumPair(int64_t n) {
    w = register_parameter("w", at::ones({n}));
    u = register_parameter("u", at::ones({n}));
  }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w, u;
};

TEST(Clip, PB14_NormCountsShardedAndReplicatedGradientsOnceEach) {
  for (int ranks : {1, 4})
    for (int length : kLengths)
      each_rank(ranks, [length](std::shared_ptr<World> world) {
        auto m = std::make_shared<SumPair>(8 * length);
        fully_shard(m, Mesh::shard(world), {.ignored_params = {m->u}});
        call(*m).backward();
        m->u.mutable_grad() = at::ones({8 * length});
        ASSERT_TRUE(all_equal(full_grad(m->w), 1));
        const double expected = 4 * std::sqrt(length);
        EXPECT_EQ(optim::clip_grad_norm_(*m, expected / 2), expected) << "rank " << world->rank();
        EXPECT_TRUE(all_near(full_grad(m->w), 0.5));
        EXPECT_TRUE(all_near(m->u.grad(), 0.5));
        EXPECT_TRUE(nothing_unsharded(*m));
      });
}

TEST(Clip, PB14_NormOnReplicasOfShardsCountsEveryElementOnce) {
  for (int length : kLengths)
    each_rank(4, [length](std::shared_ptr<World> world) {
      auto m = std::make_shared<SumPair>(8 * length);
      fully_shard(m, Mesh::hybrid(world, 2), {.ignored_params = {m->u}});
      call(*m).backward();
      const double expected = 2.828427 * std::sqrt(length);
      EXPECT_NEAR(optim::clip_grad_norm_(*m, expected / 2), expected, 1e-6 * length) << "rank " << world->rank();
      EXPECT_TRUE(all_near(full_grad(m->w), 0.5));
      EXPECT_TRUE(nothing_unsharded(*m));
    });
}

struct Weighted : torch::nn::Module {
  explicit Weighted(int64_t n = 4) { w = register_parameter("w", at::ones({n})); }
  at::Tensor forward(const at::Tensor& a) { return (w * a).sum(); }
  at::Tensor w;
};

/// The gradient 1/2 (a0 + a1) over one or two ranks, of 4 elements or with each of them repeated, then `body(model, gradient)`, where
/// gradient() is the full one as of now, as 4 elements.
void with_gradient(const at::Tensor& a0, const at::Tensor& a1,
                   const std::function<void(Weighted&, const std::function<at::Tensor()>&)>& body) {
  for (auto [ranks, length] : {std::pair{1, 1}, {2, 1}, {2, kLengths[1]}})
    each_rank(ranks, [&, ranks = ranks, length = length](std::shared_ptr<World> world) {
      SCOPED_TRACE("rank " + std::to_string(world->rank()) + " of " + std::to_string(ranks) + ", length " + std::to_string(length));
      auto m = std::make_shared<Weighted>(4 * length);
      fully_shard(m, Mesh::shard(world));
      const auto first = a0.repeat_interleave(length), second = a1.repeat_interleave(length);
      auto loss = ranks == 1 ? (call(*m, first) + call(*m, second)) / 2 : call(*m, world->rank() == 0 ? first : second);
      loss.backward();
      body(*m, [&, length] {
        auto parts = full_grad(m->w).view({4, length});
        EXPECT_TRUE(at::allclose(parts, parts.slice(1, 0, 1).expand_as(parts), 0, 0, true)) << parts;
        return parts.select(1, 0).contiguous();
      });
      EXPECT_TRUE(all_equal(full_tensor(m->w), 1)) << "clipping changes no parameter";
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

// linear_cross_entropy against LibTorch's loss of the same logits.
#include "fsdpp/ops/cross_entropy.h"

#include <cmath>
#include <limits>

#include "fsdpp/base/error.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

constexpr int64_t kDim = 12;

struct Case {
  at::Tensor x, weight, targets;
};
Case make_case(int64_t rows, int64_t vocab, c10::ScalarType type) {
  auto targets = at::randint(vocab, {rows}, at::detail::createCPUGenerator(3), at::TensorOptions(at::kLong));
  if (rows > 2) targets[rows / 2] = -100;
  return {random({rows, kDim}, type, 1), random({vocab, kDim}, type, 2), targets};
}

Outcome ours(const Case& c, int64_t chunk, double grad = 1) {
  auto op = [&](const Tensors& in) -> Tensors {
    return {ops::linear_cross_entropy(in[0], in[1], c.targets, {.chunk_rows = chunk})};
  };
  return outcome_of(op, {c.x, c.weight}, {at::scalar_tensor(grad, c.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)});
}

// The loss of logits rounded to the type, in double; gradients from softmax - onehot rounded to it.
Outcome expected(const Case& c, double grad = 1) {
  auto type = c.x.scalar_type();
  auto logits = at::mm(c.x, c.weight.t()).to(at::kDouble).requires_grad_();
  auto loss = at::cross_entropy_loss(logits, c.targets), sum = at::cross_entropy_loss(logits, c.targets, {}, at::Reduction::Sum);
  auto count = c.targets.ne(-100).sum().item<double>();
  auto d = torch::autograd::grad({sum}, {logits})[0].to(type).to(at::kDouble);
  return {{loss.detach()}, {d.mm(in_double(c.weight)) * (grad / count), d.t().mm(in_double(c.x)) * (grad / count)}};
}

TEST(LinearCrossEntropy, EqualsTheLossOfItsLogitsInAllTypesAndChunks) {
  for (auto type : kTypes)
    for (int64_t vocab : {2, 9, 1000, 1037})
      for (auto [rows, chunk] : {std::pair<int64_t, int64_t>{1, 0}, {7, 0}, {7, 1}, {7, 3}, {64, 16}, {65, 64}, {5, 100}}) {
        SCOPED_TRACE(::testing::Message() << type << " vocab " << vocab << " rows " << rows << " chunk " << chunk);
        auto c = make_case(rows, vocab, type);
        auto got = ours(c, chunk, 2.5), want = expected(c, 2.5);
        EXPECT_EQ(got.outputs[0].scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
        auto loss = want.outputs[0].item<double>();
        EXPECT_NEAR(got.outputs[0].item<double>(), loss, (type == at::kDouble ? 1e-12 : 3e-6) * (1 + loss));
        // a rounding for the product, one for the factor; a chunk's sums in 16 bits have none
        for (size_t i = 0; i < 2; ++i)
          EXPECT_LE((in_double(got.gradients[i]) - want.gradients[i]).norm().item<double>(),
                    (4 * rounding(type) + (type == at::kDouble ? 1e-13 : 1e-5)) * want.gradients[i].norm().item<double>() +
                        1e-7 * (type == at::kHalf))
              << "gradient " << i;
      }
}

TEST(LinearCrossEntropy, TakesLeadingDimensionsAndNonContiguousTensors) {
  auto x = random({kDim, 4, 3}, at::kFloat, 1).permute({2, 1, 0}), weight = random({kDim, 20}, at::kFloat, 2).t();
  auto targets = at::arange(12).view({4, 3}).t();
  auto got = ours({x, weight, targets}, 5), want = ours({x.reshape({12, kDim}), weight.contiguous(), targets.reshape({12})}, 5);
  EXPECT_TRUE(at::allclose(got.outputs[0], want.outputs[0], 1e-6));
  EXPECT_TRUE(at::allclose(got.gradients[0].reshape({12, kDim}), want.gradients[0], 1e-5, 1e-7));
  EXPECT_TRUE(at::allclose(got.gradients[1], want.gradients[1], 1e-5, 1e-7));
}

TEST(LinearCrossEntropy, WithAllTargetsIgnoredIsNanWithoutGradient) {
  auto c = make_case(4, 9, at::kFloat);
  c.targets.fill_(-100);
  auto got = ours(c, 2);
  EXPECT_TRUE(std::isnan(got.outputs[0].item<float>()));
  for (auto& g : got.gradients) EXPECT_TRUE(at::equal(g, at::zeros_like(g)));
  Case empty{at::ones({0, kDim}), at::ones({9, kDim}), at::ones({0}, at::kLong)};
  got = ours(empty, 0);
  EXPECT_TRUE(std::isnan(got.outputs[0].item<float>()));
  EXPECT_TRUE(at::equal(got.gradients[1], at::zeros({9, kDim})));
}

TEST(LinearCrossEntropy, AnotherIgnoreIndexMayBeAClass) {
  auto c = make_case(6, 9, at::kFloat);
  c.targets.copy_(at::tensor({0, 1, 2, 0, 4, 5}));
  auto loss = ops::linear_cross_entropy(c.x, c.weight, c.targets, {.ignore_index = 0});
  auto want = at::cross_entropy_loss(at::linear(c.x, c.weight), c.targets, {}, at::Reduction::Mean, 0);
  EXPECT_NEAR(loss.item<float>(), want.item<float>(), 1e-5);
}

TEST(LinearCrossEntropy, OfLargeAndInfiniteLogitsIsLibTorchs) {
  auto weight = at::tensor({1.0F, -1.0F, 0.5F}).view({3, 1}), targets = at::tensor({1L, 0L, 2L});
  auto x = at::tensor({1e4F, -3e4F, 80.0F}).view({3, 1});
  auto loss = ops::linear_cross_entropy(x, weight, targets), want = at::cross_entropy_loss(at::linear(x, weight), targets);
  EXPECT_NEAR(loss.item<float>(), want.item<float>(), 1e-6 * want.item<float>());
  x[0] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(ops::linear_cross_entropy(x, weight, targets).item<float>()));
}

TEST(LinearCrossEntropy, GivesOnlyTheGradientsThatAreWanted) {
  auto c = make_case(5, 9, at::kFloat);
  auto all = ours(c, 2);
  for (int wanted : {0, 1}) {
    auto x = c.x.detach(), weight = c.weight.detach();
    (wanted == 0 ? x : weight).requires_grad_();
    ops::linear_cross_entropy(x, weight, c.targets, {.chunk_rows = 2}).backward();
    EXPECT_EQ(x.grad().defined(), wanted == 0);
    EXPECT_EQ(weight.grad().defined(), wanted == 1);
    EXPECT_TRUE(at::equal((wanted == 0 ? x : weight).grad(), all.gradients[static_cast<size_t>(wanted)]));
  }
  auto x = c.x.detach().requires_grad_();
  at::NoGradGuard no_grad;
  auto loss = ops::linear_cross_entropy(x, c.weight, c.targets);
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_NEAR(loss.item<float>(), all.outputs[0].item<float>(), 1e-6);
}

TEST(LinearCrossEntropy, MisuseIsAnError) {
  auto c = make_case(4, 9, at::kFloat);
  auto loss_of = [&](int64_t target) {
    c.targets[1] = target;
    return ops::linear_cross_entropy(c.x, c.weight, c.targets);
  };
  EXPECT_NO_THROW(loss_of(8));
  for (int64_t target : {-1L, 9L, -101L, std::numeric_limits<int64_t>::max()}) EXPECT_THROW(loss_of(target), UsageError);
  c.targets.fill_(1);
  EXPECT_THROW((void)ops::linear_cross_entropy(c.x, at::ones({9, kDim + 1}), c.targets), UsageError);
  EXPECT_THROW((void)ops::linear_cross_entropy(c.x, c.weight.to(at::kHalf), c.targets), UsageError);
  EXPECT_THROW((void)ops::linear_cross_entropy(c.x, c.weight, c.targets.to(at::kInt)), UsageError);
  EXPECT_THROW((void)ops::linear_cross_entropy(c.x, c.weight, at::ones({3}, at::kLong)), UsageError);
  EXPECT_THROW((void)ops::linear_cross_entropy(c.x, c.weight, c.targets, {.chunk_rows = -1}), UsageError);
}

TEST(LinearCrossEntropy, IsDifferentiableOnceAndBackwardRunsOnce) {
  auto c = make_case(4, 9, at::kFloat);
  auto x = c.x.detach().requires_grad_();
  auto loss = ops::linear_cross_entropy(x, c.weight, c.targets);
  EXPECT_THROW(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
  torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
  EXPECT_THROW(torch::autograd::grad({loss}, {x}), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

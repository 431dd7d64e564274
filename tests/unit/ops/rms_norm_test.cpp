// rms_norm and add_rms_norm against LibTorch's, in double from the same inputs.
#include "fsdpp/ops/rms_norm.h"

#include "fsdpp/base/error.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

Tensors normed(const Tensors& in, std::optional<double> eps = {}) { return {ops::rms_norm(in[0], in[1], eps)}; }
Tensors normed_exactly(const Tensors& in, std::optional<double> eps = {}) {
  return {at::rms_norm(in[0], {in[0].size(-1)}, in[1], eps)};
}
Tensors added(const Tensors& in) {
  auto [normed, sum] = ops::add_rms_norm(in[0], in[1], in[2], 1e-5);
  return {normed, sum};
}
// The sum enters as a leaf, since it is rounded before it is normalised.
Tensors added_exactly(const Tensors& in) { return {at::rms_norm(in[0], {in[0].size(-1)}, in[1], 1e-5), in[0] * 1}; }

const std::vector<std::vector<int64_t>> kShapes = {{1, 1},   {3, 7},          {2, 5, 64}, {1, 257},
                                                   {4, 513}, {2, 3, 2, 2048}, {2, 16384}, {0, 8}};

TEST(RmsNorm, EqualsLibTorchsInAllTypesAndShapes) {
  for (auto type : kTypes)
    for (auto& shape : kShapes) {
      auto dim = shape.back();
      Tensors in{random(shape, type, 1) * 3, random({dim}, type, 2)}, grads{random(shape, type, 3)};
      SCOPED_TRACE(::testing::Message() << type << " " << shape);
      auto eps = type == at::kDouble ? std::optional<double>() : std::optional<double>(0x1p-23);  // the default, named for double
      expect_rounded(outcome_of([](auto& t) { return normed(t); }, in, grads),
                     outcome_of([&](auto& t) { return normed_exactly(t, eps); }, in_double(in), in_double(grads)));
    }
}

TEST(RmsNorm, DefaultEpsIsLibTorchs) {
  for (auto type : kTypes) {
    Tensors in{at::full({2, 4}, type == at::kDouble ? 1e-8 : 1e-4).to(type), at::ones({4}, type)};
    EXPECT_TRUE(at::allclose(normed(in)[0], normed_exactly(in)[0], type == at::kDouble ? 1e-12 : 0x1p-8)) << type;
  }
  Tensors zeros{at::zeros({2, 4}), at::ones({4})};
  EXPECT_TRUE(at::equal(normed(zeros)[0], zeros[0]));
}

TEST(AddRmsNorm, EqualsAdditionThenNorm) {
  for (auto type : kTypes)
    for (auto& shape : kShapes)
      for (int used : {0, 1, 2}) {  // both results, the norm, the sum
        auto dim = shape.back();
        Tensors in{random(shape, type, 1), random(shape, type, 4) * 2, random({dim}, type, 2)};
        Tensors grads{random(shape, type, 3), random(shape, type, 5)};
        if (used > 0) grads[static_cast<size_t>(2 - used)] = at::Tensor();
        SCOPED_TRACE(::testing::Message() << type << " " << shape << " used " << used);
        auto got = outcome_of(added, in, grads);
        EXPECT_TRUE(at::equal(got.outputs[1], in[0] + in[1]));
        auto want = outcome_of(added_exactly, in_double({in[0] + in[1], in[2]}), in_double(grads));
        want.gradients.insert(want.gradients.begin(), want.gradients[0]);  // x and the residual get the sum's
        expect_rounded(got, want);
      }
}

TEST(AddRmsNorm, TakesNonContiguousTensors) {
  auto x = random({6, 40}, at::kFloat, 1).t(), residual = random({40, 12}, at::kFloat, 2).slice(1, 0, 12, 2),
       weight = random({12}, at::kFloat, 3);
  Tensors in{x, residual, weight.slice(0, 0, 12, 2)}, dense{x.contiguous(), residual.contiguous(), in[2].contiguous()};
  Tensors grads{random({6, 40}, at::kFloat, 4).t(), random({40}, at::kFloat, 5).unsqueeze(1).expand({40, 6})};
  auto got = outcome_of(added, in, grads), want = outcome_of(added, dense, {grads[0].contiguous(), grads[1].contiguous()});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i])) << i;
  EXPECT_TRUE(at::equal(got.outputs[0], want.outputs[0]));
}

TEST(AddRmsNorm, GivesOnlyTheGradientsThatAreWanted) {
  auto x = random({3, 8}, at::kFloat, 1), residual = random({3, 8}, at::kFloat, 2), weight = random({8}, at::kFloat, 3);
  for (int wanted : {0, 1, 2}) {
    Tensors in{x.detach(), residual.detach(), weight.detach()};
    in[static_cast<size_t>(wanted)].requires_grad_();
    added(in)[0].square().sum().backward();
    auto all = outcome_of(added, {x, residual, weight}, {2 * added({x, residual, weight})[0], at::Tensor()});
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(in[i].grad().defined(), static_cast<int>(i) == wanted);
    EXPECT_TRUE(at::equal(in[static_cast<size_t>(wanted)].grad(), all.gradients[static_cast<size_t>(wanted)]));
  }
  at::NoGradGuard no_grad;
  EXPECT_FALSE(added({x, residual, weight.detach().requires_grad_()})[0].requires_grad());
}

TEST(AddRmsNorm, KeepsTheSumAlone) {
  auto x = random({3, 8}, at::kFloat, 1).requires_grad_(), residual = random({3, 8}, at::kFloat, 2),
       weight = random({8}, at::kFloat, 3);
  auto [normed, sum] = ops::add_rms_norm(x, residual, weight);
  EXPECT_EQ(residual.use_count(), 1);
  normed.sum().backward();  // a graph whose results are not kept can't be run again
  EXPECT_THROW(normed.sum().backward(), c10::Error);
}

TEST(RmsNorm, MisuseIsAnError) {
  auto x = at::ones({2, 8}).requires_grad_(), weight = at::ones({8});
  EXPECT_THROW((void)ops::rms_norm(x, at::ones({7})), UsageError);
  EXPECT_THROW((void)ops::rms_norm(x, at::ones({8}, at::kDouble)), UsageError);
  EXPECT_THROW((void)ops::rms_norm(at::ones({2, 8}, at::kLong), at::ones({8}, at::kLong)), UsageError);
  EXPECT_THROW((void)ops::rms_norm(at::ones({1, 16385}), at::ones({16385})), UsageError);
  EXPECT_THROW((void)ops::add_rms_norm(x, at::ones({1, 8}), weight), UsageError);
  auto y = ops::rms_norm(x, weight).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
}

TEST(Comparison, SeesAWrongElement) {
  auto x = random({100}, at::kBFloat16, 1), y = in_double(x);
  EXPECT_TRUE(is_rounded(x, y));
  y[57] *= 1.01;
  EXPECT_FALSE(is_rounded(x, y));
  EXPECT_FALSE(is_rounded(x, at::Tensor()));
}

}  // namespace
}  // namespace fsdpp::test

// silu_linear and swiglu_linear against LibTorch's operators, in double from the same inputs.
#include "fsdpp/ops/activation.h"

#include "fsdpp/base/error.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

Tensors silu(const Tensors& in) { return {ops::silu_linear(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor())}; }
Tensors silu_exactly(const Tensors& in) {
  return {at::linear(at::silu(in[0]), in[1], in.size() > 2 ? std::optional(in[2]) : std::nullopt)};
}
Tensors swiglu(const Tensors& in) { return {ops::swiglu_linear(in[0], in[1], in[2], in.size() > 3 ? in[3] : at::Tensor())}; }
Tensors swiglu_exactly(const Tensors& in) {
  return {at::linear(at::silu(in[0]) * in[1], in[2], in.size() > 3 ? std::optional(in[3]) : std::nullopt)};
}

const std::vector<std::vector<int64_t>> kShapes = {{1, 1}, {3, 7}, {2, 5, 64}, {1, 1025}, {6}, {0, 8}};
constexpr int64_t kOut = 5;

TEST(SiluLinear, EqualsLinearOfSilu) {
  for (auto type : kTypes)
    for (auto& shape : kShapes)
      for (bool bias : {false, true}) {
        SCOPED_TRACE(::testing::Message() << type << " " << shape << " bias " << bias);
        Tensors in{random(shape, type, 1) * 4, random({kOut, shape.back()}, type, 2)},
            grads{random(with_last(shape, kOut), type, 3)};
        if (bias) in.push_back(random({kOut}, type, 4));
        expect_close(outcome_of(silu, in, grads), outcome_of(silu_exactly, in_double(in), in_double(grads)), tolerance(type));
      }
}

TEST(SwigluLinear, EqualsLinearOfTheGatedProduct) {
  for (auto type : kTypes)
    for (auto& shape : kShapes)
      for (bool bias : {false, true}) {
        SCOPED_TRACE(::testing::Message() << type << " " << shape << " bias " << bias);
        Tensors in{random(shape, type, 1) * 4, random(shape, type, 5), random({kOut, shape.back()}, type, 2)};
        Tensors grads{random(with_last(shape, kOut), type, 3)};
        if (bias) in.push_back(random({kOut}, type, 4));
        expect_close(outcome_of(swiglu, in, grads), outcome_of(swiglu_exactly, in_double(in), in_double(grads)), tolerance(type));
      }
}

TEST(SiluLinear, OfExtremeValuesIsThatOfSilu) {
  auto h = at::tensor({-1000.0F, -89.0F, -88.0F, -20.0F, 0.0F, 20.0F, 89.0F, 1000.0F}).view({8, 1});
  Tensors in{h, at::ones({1, 1})}, grads{at::ones({8, 1})};
  auto got = outcome_of(silu, in, grads), want = outcome_of(silu_exactly, in_double(in), in_double(grads));
  EXPECT_TRUE(at::allclose(in_double(got.outputs[0]), want.outputs[0], 1e-6, 1e-30)) << got.outputs[0];
  EXPECT_TRUE(at::allclose(in_double(got.gradients[0]), want.gradients[0], 1e-6, 1e-30)) << got.gradients[0];
}

TEST(SiluLinear, GivesOnlyTheGradientsThatAreWanted) {
  Tensors in{random({3, 4}, at::kFloat, 1), random({3, 4}, at::kFloat, 2), random({5, 4}, at::kFloat, 3),
             random({5}, at::kFloat, 4)};
  auto all = outcome_of(swiglu, in, {at::ones({3, 5})});
  for (size_t wanted = 0; wanted < 4; ++wanted) {
    Tensors leaves;
    for (auto& t : in) leaves.push_back(t.detach());
    leaves[wanted].requires_grad_();
    swiglu(leaves)[0].sum().backward();
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(leaves[i].grad().defined(), i == wanted);
    EXPECT_TRUE(at::equal(leaves[wanted].grad(), all.gradients[wanted])) << wanted;
  }
  at::NoGradGuard no_grad;
  EXPECT_FALSE(silu({in[0].detach().requires_grad_(), in[2]})[0].requires_grad());
}

TEST(SwigluLinear, TakesHalvesOfOneTensor) {
  auto both = random({3, 16}, at::kFloat, 1).requires_grad_(), weight = random({5, 8}, at::kFloat, 2);
  auto halves = both.chunk(2, -1);
  auto got = ops::swiglu_linear(halves[0], halves[1], weight), want = swiglu_exactly({halves[0], halves[1], weight})[0];
  EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-6));
  auto g = torch::autograd::grad({got.square().sum()}, {both})[0], w = torch::autograd::grad({want.square().sum()}, {both})[0];
  EXPECT_TRUE(at::allclose(g, w, 1e-4, 1e-5));
}

TEST(SiluLinear, BackwardTwiceThroughAKeptGraphGivesTheSame) {
  auto h = random({3, 4}, at::kFloat, 1).requires_grad_(), weight = random({5, 4}, at::kFloat, 2).requires_grad_();
  auto y = ops::silu_linear(h, weight).sum();
  auto first = torch::autograd::grad({y}, {h, weight}, {}, /*retain_graph=*/true),
       second = torch::autograd::grad({y}, {h, weight});
  EXPECT_TRUE(at::equal(first[0], second[0]));
  EXPECT_TRUE(at::equal(first[1], second[1]));
}

TEST(SiluLinear, MisuseIsAnError) {
  auto h = at::ones({2, 4}).requires_grad_(), weight = at::ones({5, 4});
  EXPECT_THROW((void)ops::silu_linear(h, at::ones({5, 3})), UsageError);
  EXPECT_THROW((void)ops::silu_linear(h, weight.to(at::kDouble)), UsageError);
  EXPECT_THROW((void)ops::swiglu_linear(h, at::ones({4}), weight), UsageError);
  auto y = ops::silu_linear(h, weight).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {h}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

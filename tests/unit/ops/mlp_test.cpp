// silu_mlp against LibTorch's operators, in double from the same inputs.
#include "fsdpp/ops/mlp.h"

#include "fsdpp/base/error.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

constexpr int64_t kWidth = 9, kOut = 5;

// {x, up, down, up_bias, down_bias}; biases may be undefined.
Tensors mlp(const Tensors& in) { return {ops::silu_mlp(in[0], in[1], in[2], in[3], in[4])}; }
Tensors mlp_exactly(const Tensors& in) {
  auto maybe = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return {at::linear(at::silu(at::linear(in[0], in[1], maybe(in[3]))), in[2], maybe(in[4]))};
}

Tensors inputs(std::vector<int64_t> shape, c10::ScalarType type, bool up_bias, bool down_bias) {
  const auto in = shape.back();
  return {random(shape, type, 1), random({kWidth, in}, type, 2), random({kOut, kWidth}, type, 3),
          up_bias ? random({kWidth}, type, 4) : at::Tensor(), down_bias ? random({kOut}, type, 5) : at::Tensor()};
}

// Of the defined ones, as outcome_of wants it.
Outcome outcome(const Operator& op, const Tensors& in, const at::Tensor& grad) {
  Tensors defined;
  for (auto& t : in)
    if (t.defined()) defined.push_back(t);
  auto spread = [&](const Tensors& given) {
    Tensors all;
    size_t next = 0;
    for (auto& t : in) all.push_back(t.defined() ? given[next++] : t);
    return op(all);
  };
  return outcome_of(spread, defined, {grad});
}

TEST(SiluMlp, EqualsTwoLinearsWithSiluBetween) {
  for (auto type : kTypes)
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 1}, {3, 7}, {2, 5, 64}, {6}, {0, 8}})
      for (bool up_bias : {false, true})
        for (bool down_bias : {false, true}) {
          SCOPED_TRACE(::testing::Message() << type << " " << shape << " biases " << up_bias << down_bias);
          const auto in = inputs(shape, type, up_bias, down_bias);
          const auto grad = random(with_last(shape, kOut), type, 6);
          expect_close(outcome(mlp, in, grad), outcome(mlp_exactly, in_double(in), in_double(grad)),
                       4 * tolerance(type));
        }
}

TEST(SiluMlp, GivesOnlyTheGradientsThatAreWanted) {
  const auto in = inputs({3, 4}, at::kFloat, true, true);
  const auto all = outcome(mlp, in, at::ones({3, kOut}));
  for (size_t wanted = 0; wanted < in.size(); ++wanted) {
    Tensors leaves;
    for (auto& t : in) leaves.push_back(t.detach());
    leaves[wanted].requires_grad_();
    mlp(leaves)[0].sum().backward();
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(leaves[i].grad().defined(), i == wanted) << wanted << " " << i;
    EXPECT_TRUE(at::equal(leaves[wanted].grad(), all.gradients[wanted])) << wanted;
  }
}

TEST(SiluMlp, BackwardTwiceThroughAKeptGraphGivesTheSame) {
  auto in = inputs({3, 4}, at::kFloat, false, false);
  for (size_t i = 0; i < 3; ++i) in[i].requires_grad_();
  auto y = mlp(in)[0].square().sum();
  auto first = torch::autograd::grad({y}, {in[0], in[1], in[2]}, {}, /*retain_graph=*/true),
       second = torch::autograd::grad({y}, {in[0], in[1], in[2]});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(first[i], second[i]));
}

TEST(SiluMlp, MisuseIsAnError) {
  auto x = at::ones({2, 4}).requires_grad_(), up = at::ones({6, 4}), down = at::ones({5, 6});
  EXPECT_THROW((void)ops::silu_mlp(x, down, up), UsageError);
  EXPECT_THROW((void)ops::silu_mlp(x, up, at::ones({5, 4})), UsageError);
  EXPECT_THROW((void)ops::silu_mlp(x, up, down.to(at::kDouble)), UsageError);
  auto y = ops::silu_mlp(x, up, down).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

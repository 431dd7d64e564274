// Attention from and to packed tensors, against at::scaled_dot_product_attention of query, key and value kept apart.
#include "fsdpp/ops/attention.h"

#include <gmock/gmock.h>

#include "compare.h"
#include "fsdpp/api/checkpoint.h"
#include "fsdpp/base/error.h"
#include "fsdpp/ops/linear.h"
#include "ops/libtorch_attention.h"

namespace fsdpp::test {
namespace {

using ops::AttentionOptions;
using ::testing::HasSubstr;

struct Case {
  std::vector<int64_t> leading;  // dimensions before seq
  int64_t seq, dim;
  AttentionOptions options;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << at::IntArrayRef(c.leading) << " seq " << c.seq << ", dim " << c.dim << ", heads " << c.options.heads
             << (c.options.causal ? ", causal" : "") << ", scale " << c.options.scale.value_or(0);
}
const Case kCases[] = {{{2}, 5, 12, {.heads = 3}},
                       {{2}, 5, 12, {.heads = 3, .causal = true}},
                       {{1}, 7, 8, {.heads = 1, .scale = 0.3}},
                       {{2, 3}, 4, 6, {.heads = 6, .causal = true, .scale = 2.0}},
                       {{}, 9, 16, {.heads = 2}},
                       {{3}, 1, 4, {.heads = 2, .causal = true}},
                       {{2}, 70, 64, {.heads = 4, .causal = true}}};

std::vector<int64_t> sizes_of(const Case& c, int64_t width) {
  auto sizes = c.leading;
  sizes.insert(sizes.end(), {c.seq, width});
  return sizes;
}

// LibTorch's, from three dense tensors as a model without packing has them.
at::Tensor separate(const at::Tensor& qkv, const AttentionOptions& options) {
  const auto dim = qkv.size(-1) / 3;
  auto by_head = [&](int64_t part) {
    auto t =
        qkv.narrow(-1, part * dim, dim).contiguous().reshape({-1, qkv.size(-2), options.heads, dim / options.heads});
    return t.transpose(1, 2);
  };
  auto sizes = qkv.sizes().vec();
  sizes.back() = dim;
  return at::scaled_dot_product_attention(by_head(0), by_head(1), by_head(2), {}, 0.0, options.causal, options.scale)
      .transpose(1, 2)
      .reshape(sizes);
}

// The formula itself.
at::Tensor formula(const at::Tensor& qkv, const AttentionOptions& options) {
  auto parts = qkv.unflatten(-1, {3, options.heads, -1}).transpose(-2, -4).unbind(-3);  // each [..., heads, seq, d]
  auto scores = at::matmul(parts[0], parts[1].transpose(-1, -2)) *
                options.scale.value_or(1 / std::sqrt(static_cast<double>(parts[0].size(-1))));
  if (options.causal) scores = scores.masked_fill(at::ones_like(scores, at::kBool).triu(1), -INFINITY);
  return at::matmul(scores.softmax(-1), parts[2]).transpose(-2, -3).flatten(-2);
}

Operator packed(const AttentionOptions& options) {
  return [=](const Tensors& in) { return Tensors{ops::attention(in[0], options)}; };
}

TEST(Attention, IsThatOfSeparateTensorsToTheBitInEveryTypeAndShape) {
  for (const auto& c : kCases)
    for (auto type : kTypes) {
      const auto qkv = random(sizes_of(c, 3 * c.dim), type, 1), grad = random(sizes_of(c, c.dim), type, 2);
      const auto got = outcome_of(packed(c.options), {qkv}, {grad});
      const auto want =
          outcome_of([&](const Tensors& in) { return Tensors{separate(in[0], c.options)}; }, {qkv}, {grad});
      EXPECT_TRUE(at::equal(got.outputs[0], want.outputs[0])) << c << type;
      EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0])) << c << type;
      EXPECT_TRUE(got.outputs[0].is_contiguous()) << c;
    }
}

TEST(Attention, IsTheFormula) {
  for (const auto& c : kCases) {
    const auto qkv = random(sizes_of(c, 3 * c.dim), at::kDouble, 3), grad = random(sizes_of(c, c.dim), at::kDouble, 4);
    const auto got = outcome_of(packed(c.options), {qkv}, {grad});
    const auto want = outcome_of([&](const Tensors& in) { return Tensors{formula(in[0], c.options)}; }, {qkv}, {grad});
    EXPECT_LT((got.outputs[0] - want.outputs[0]).abs().max().item<double>(), 1e-13) << c;
    EXPECT_LT((got.gradients[0] - want.gradients[0]).abs().max().item<double>(), 1e-12) << c;
  }
}

// (f(x + h e) - f(x - h e)) / 2h for each element of x.
at::Tensor finite_differences(const std::function<double(const at::Tensor&)>& f, const at::Tensor& x) {
  auto result = at::empty_like(x), at = x.detach().clone();
  const double h = 1e-5;
  for (int64_t i = 0; i < x.numel(); ++i) {
    auto element = at.view(-1)[i];
    const auto before = element.clone();
    element.copy_(before + h);
    const double more = f(at);
    element.copy_(before - h);
    result.view(-1)[i] = (more - f(at)) / (2 * h);
    element.copy_(before);
  }
  return result;
}

TEST(Attention, GradientsAreFiniteDifferences) {
  for (const auto& c : kCases) {
    if (c.seq > 20) continue;
    const auto x = random(sizes_of(c, 3 * c.dim), at::kDouble, 5).requires_grad_(),
               weights = random(sizes_of(c, c.dim), at::kDouble, 6);
    const auto grad = torch::autograd::grad({(ops::attention(x, c.options) * weights).sum()}, {x})[0];
    at::NoGradGuard no_grad;
    auto f = [&](const at::Tensor& at) { return (ops::attention(at, c.options) * weights).sum().item<double>(); };
    EXPECT_LT((grad - finite_differences(f, x)).abs().max().item<double>(), 1e-8) << c;
  }
}

// What a backward with create_graph computes where cuDNN ran forward.
TEST(Attention, GradientByPlainOperatorsIsTheSameAndDifferentiableAgain) {
  for (const auto& c : kCases) {
    if (c.seq > 20) continue;
    const auto x = random(sizes_of(c, 3 * c.dim), at::kDouble, 7).requires_grad_();
    const auto grad_out = random(sizes_of(c, c.dim), at::kDouble, 8).requires_grad_();
    const auto want = torch::autograd::grad({ops::attention(x, c.options)}, {x}, {grad_out.detach()})[0];
    const auto got = ops::libtorch_attention_gradient(x, grad_out, c.options);
    EXPECT_LT((got - want).abs().max().item<double>(), 1e-13) << c;
    const auto weights = random(x.sizes(), at::kDouble, 9);
    const auto second = torch::autograd::grad({(got * weights).sum()}, {x, grad_out});
    auto first = [&](const at::Tensor& at, const at::Tensor& g) {
      return (ops::libtorch_attention_gradient(at.detach().requires_grad_(), g, c.options) * weights)
          .sum()
          .item<double>();
    };
    at::NoGradGuard no_grad;
    EXPECT_LT(
        (second[0] - finite_differences([&](auto& at) { return first(at, grad_out); }, x)).abs().max().item<double>(),
        1e-7)
        << c;
    EXPECT_LT(
        (second[1] - finite_differences([&](auto& g) { return first(x, g); }, grad_out)).abs().max().item<double>(),
        1e-7)
        << c;
    EXPECT_FALSE(ops::libtorch_attention_gradient(x, grad_out, c.options).requires_grad())
        << "not recorded without create_graph";
  }
}

// As often as LibTorch's operator is.
TEST(Attention, ByLibTorchsMathBackendIsDifferentiableTwice) {
  const auto x = random({2, 5, 36}, at::kDouble, 16).requires_grad_(), weights = random({2, 5, 36}, at::kDouble, 17);
  auto second = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.square().sum()}, {x}, {}, {}, /*create_graph=*/true)[0];
    return torch::autograd::grad({(first * weights).sum()}, {x})[0];
  };
  at::globalContext().setSDPUseFlash(false);
  const auto got = second(ops::attention(x, {.heads = 3}));
  at::globalContext().setSDPUseFlash(true);
  EXPECT_LT((got - second(formula(x, {.heads = 3}))).abs().max().item<double>(), 1e-12);
}

TEST(Attention, OfStridedInputIsThatOfItsCopy) {
  const AttentionOptions options{.heads = 3, .causal = true};
  const auto wide = random({5, 2, 40}, at::kFloat, 10), grad = random({2, 5, 12}, at::kFloat, 11);
  auto strided = [](const at::Tensor& t) { return t.transpose(0, 1).narrow(-1, 3, 36); };
  auto of_view = [&](const Tensors& in) { return Tensors{ops::attention(strided(in[0]), options)}; };
  auto of_copy = [&](const Tensors& in) { return Tensors{ops::attention(strided(in[0]).contiguous(), options)}; };
  const auto got = outcome_of(of_view, {wide}, {grad}), want = outcome_of(of_copy, {wide}, {grad});
  EXPECT_TRUE(at::equal(got.outputs[0], want.outputs[0]));
  EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0]));
}

TEST(Attention, WithoutGradientRecordsNothing) {
  const auto qkv = random({2, 5, 36}, at::kFloat, 12);
  EXPECT_FALSE(ops::attention(qkv, {.heads = 3}).requires_grad());
  const auto leaf = qkv.clone().requires_grad_();
  at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(ops::attention(leaf, {.heads = 3}), ops::attention(qkv, {.heads = 3})));
}

TEST(Attention, OfNoTokensIsEmpty) {
  const auto qkv = at::empty({0, 5, 36}).requires_grad_();
  const auto out = ops::attention(qkv, {.heads = 3});
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{0, 5, 12}));
  EXPECT_EQ(torch::autograd::grad({out.sum()}, {qkv})[0].sizes(), qkv.sizes());
}

TEST(Attention, RecomputedGivesTheSameGradients) {
  const auto x = random({2, 5, 12}, at::kFloat, 13), weight = random({36, 12}, at::kFloat, 14),
             grad = random({2, 5, 12}, at::kFloat, 15);
  auto plain = [](const Tensors& in) { return Tensors{ops::attention(ops::linear(in[0], in[1]), {.heads = 3})}; };
  auto again = [&](const Tensors& in) {
    return Tensors{
        checkpoint([&](const at::Tensor& t) { return ops::attention(ops::linear(t, in[1]), {.heads = 3}); }, in[0])};
  };
  const auto got = outcome_of(again, {x, weight}, {grad}), want = outcome_of(plain, {x, weight}, {grad});
  EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0]));
  EXPECT_TRUE(at::equal(got.gradients[1], want.gradients[1]));
}

std::string refusal(const at::Tensor& qkv, const AttentionOptions& options) {
  try {
    (void)ops::attention(qkv, options);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Attention, MisuseNamesWhatWasExpectedAndWhatCame) {
  const auto qkv = at::zeros({2, 5, 36});
  EXPECT_THAT(refusal({}, {.heads = 3}),
              HasSubstr("attention: expected qkv of a floating dtype, got an undefined tensor"));
  EXPECT_THAT(refusal(qkv.to(at::kLong), {.heads = 3}), HasSubstr("got Long"));
  EXPECT_THAT(refusal(at::zeros({36}), {.heads = 3}), HasSubstr("expected qkv as [..., seq, 3 * dim], got [36]"));
  EXPECT_THAT(refusal(qkv, {.heads = 5}), HasSubstr("got [2, 5, 36] and 5 heads"));
  EXPECT_THAT(refusal(at::zeros({2, 5, 35}), {.heads = 1}), HasSubstr("got [2, 5, 35]"));
  EXPECT_THAT(refusal(qkv, {}), HasSubstr("0 heads"));
  EXPECT_THAT(refusal(qkv, {.heads = -3}), HasSubstr("-3 heads"));
  EXPECT_THAT(refusal(at::zeros({2, 5, 0}), {.heads = 1}), HasSubstr("Try: query, key and value beside each other"));
}

}  // namespace
}  // namespace fsdpp::test

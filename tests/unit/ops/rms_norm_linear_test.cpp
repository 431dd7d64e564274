// rms_norm_linear has the bits of the operators that it stands for, and keeps less.
#include "fsdpp/ops/rms_norm_linear.h"

#include "fsdpp/base/error.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/ops/rms_norm.h"
#include "support/byte_count.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

struct Form {
  bool residual, bias;
  int64_t parts;
};

// Inputs: x, norm weight, weight, then residual and bias as far as there are. Results: the parts, the sum.
ops::RmsNormLinearArgs args_of(const Tensors& in, const Form& form) {
  ops::RmsNormLinearArgs args{.x = in[0], .residual = {}, .norm_weight = in[1], .weight = in[2], .bias = {}, .parts = form.parts, .eps = 1e-5};
  if (form.residual) args.residual = in[3];
  if (form.bias) args.bias = in.back();
  return args;
}
Tensors at_once(const Tensors& in, const Form& form) {
  auto [parts, sum] = ops::rms_norm_linear(args_of(in, form));
  parts.push_back(form.residual ? sum : sum * 1);
  return parts;
}
Tensors one_by_one(const Tensors& in, const Form& form) {
  const auto a = args_of(in, form);
  auto normed = form.residual ? ops::add_rms_norm(a.x, a.residual, a.norm_weight, a.eps)
                              : ops::AddRmsNormResult{ops::rms_norm(a.x, a.norm_weight, a.eps), a.x * 1};
  auto parts = ops::split_linear(normed.normed, a.weight, a.bias, a.parts);
  parts.push_back(normed.sum);
  return parts;
}

Tensors inputs(const std::vector<int64_t>& shape, const Form& form, c10::ScalarType type) {
  const auto dim = shape.back(), out = 2 * form.parts;
  Tensors in{random(shape, type, 1) * 3, random({dim}, type, 2), random({out, dim}, type, 3)};
  if (form.residual) in.push_back(random(shape, type, 4));
  if (form.bias) in.push_back(random({out}, type, 5));
  return in;
}

void expect_same_bits(const Tensors& got, const Tensors& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].defined(), want[i].defined()) << what << i;
    EXPECT_TRUE(!want[i].defined() || at::equal(got[i], want[i])) << what << i;
  }
}

TEST(RmsNormLinear, HasTheBitsOfNormThenLinear) {
  for (auto type : kTypes)
    for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 7}, {2, 5, 64}, {4, 513}, {8}, {0, 8}})
      for (const Form form : {Form{false, false, 1}, Form{true, false, 1}, Form{false, true, 3}, Form{true, true, 3}})
        for (int missing : {-1, 0, 1, 2}) {  // the result whose gradient does not come; 2: all of the parts
          SCOPED_TRACE(::testing::Message() << type << " " << shape << " residual " << form.residual << " parts " << form.parts
                                            << " missing " << missing);
          const auto in = inputs(shape, form, type);
          auto part = shape;
          part.back() = 2;
          Tensors grads;
          for (int64_t i = 0; i < form.parts; ++i) grads.push_back(missing == 2 || missing == i ? at::Tensor() : random(part, type, 6 + i));
          grads.push_back(missing == form.parts ? at::Tensor() : random(shape, type, 9));
          const auto got = outcome_of([&](auto& t) { return at_once(t, form); }, in, grads);
          const auto want = outcome_of([&](auto& t) { return one_by_one(t, form); }, in, grads);
          expect_same_bits(got.outputs, want.outputs, "result ");
          expect_same_bits(got.gradients, want.gradients, "gradient ");
        }
}

TEST(RmsNormLinear, GivesOnlyTheGradientsThatAreWanted) {
  const Form form{true, true, 3};
  const auto in = inputs({4, 8}, form, at::kFloat);
  Tensors grads(3, at::ones({4, 2}));
  grads.push_back(at::ones({4, 8}));
  const auto all = outcome_of([&](auto& t) { return at_once(t, form); }, in, grads);
  for (size_t wanted = 0; wanted < in.size(); ++wanted) {
    Tensors leaves;
    for (auto& t : in) leaves.push_back(t.detach());
    leaves[wanted].requires_grad_();
    auto outputs = at_once(leaves, form);
    at::Tensor sum = at::zeros({});
    for (auto& o : outputs) sum = sum + o.sum();
    sum.backward();
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(leaves[i].grad().defined(), i == wanted);
    EXPECT_TRUE(at::equal(leaves[wanted].grad(), all.gradients[wanted])) << wanted;
  }
}

TEST(RmsNormLinear, BackwardTwiceThroughAKeptGraphGivesTheSame) {
  const Form form{true, false, 1};
  auto in = inputs({4, 8}, form, at::kFloat);
  for (auto& t : in) t.requires_grad_();
  auto y = at_once(in, form)[0].square().sum();
  const auto first = torch::autograd::grad({y}, in, {}, /*retain_graph=*/true), second = torch::autograd::grad({y}, in);
  expect_same_bits(second, first, "gradient ");
}

// Bytes that live on after forward: results, and what backward keeps.
int64_t bytes_kept(const Form& form, Tensors (*op)(const Tensors&, const Form&)) {
  auto in = inputs({16, 64}, form, at::kFloat);
  for (auto& t : in) t.requires_grad_();
  ByteCount bytes(c10::kCPU);
  const auto results = op(in, form);
  return bytes.now();
}

TEST(RmsNormLinear, KeepsTheSumAndOneNumberARow) {
  const Form form{true, true, 3};
  constexpr int64_t kResults = 4 * (16 * 3 * 2 + 16 * 64), kRow = 4 * 16, kNormed = 4 * 16 * 64;
  EXPECT_EQ(bytes_kept(form, at_once), kResults + kRow);
  EXPECT_EQ(bytes_kept(form, one_by_one), kResults + kRow + kNormed);
}

TEST(RmsNormLinear, MisuseIsAnError) {
  const auto x = at::ones({2, 8}).requires_grad_(), norm = at::ones({8}), weight = at::ones({6, 8});
  auto call = [](at::Tensor x, at::Tensor residual, at::Tensor norm, at::Tensor weight, int64_t parts) {
    return ops::rms_norm_linear({.x = x, .residual = residual, .norm_weight = norm, .weight = weight, .bias = {}, .parts = parts, .eps = {}});
  };
  EXPECT_NO_THROW((void)call(x, {}, norm, weight, 3));
  EXPECT_THROW((void)call(x, {}, at::ones({7}), weight, 1), UsageError);
  EXPECT_THROW((void)call(x, at::ones({1, 8}), norm, weight, 1), UsageError);
  EXPECT_THROW((void)call(x, {}, norm, at::ones({6, 7}), 1), UsageError);
  for (int64_t parts : {0, -1, 4}) EXPECT_THROW((void)call(x, {}, norm, weight, parts), UsageError);
  auto y = call(x, {}, norm, weight, 1).parts[0].sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

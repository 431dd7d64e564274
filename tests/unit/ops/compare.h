#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

/// Operators and their gradients against others, computed in double from the same inputs.
namespace fsdpp::test {

using Tensors = std::vector<at::Tensor>;
using Operator = std::function<Tensors(const Tensors&)>;

struct Outcome {
  Tensors outputs, gradients;  ///< a gradient may be undefined
};

/// Results of `op`, and gradients of all inputs for the given gradients of its results (undefined: that result is not used).
inline Outcome outcome_of(const Operator& op, const Tensors& inputs, const Tensors& output_gradients) {
  Tensors leaves;
  for (auto& t : inputs) leaves.push_back(t.is_floating_point() ? t.detach().requires_grad_() : t);
  auto outputs = op(leaves);
  Tensors used, with, wanted;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (output_gradients[i].defined()) used.push_back(outputs[i]), with.push_back(output_gradients[i]);
  for (auto& t : leaves)
    if (t.is_floating_point()) wanted.push_back(t);
  return {outputs, torch::autograd::grad(used, wanted, with, {}, false, /*allow_unused=*/true)};
}

inline at::Tensor in_double(const at::Tensor& t) { return t.defined() && t.is_floating_point() ? t.detach().to(at::kDouble) : t; }
inline Tensors in_double(const Tensors& list) {
  Tensors wide;
  for (auto& t : list) wide.push_back(in_double(t));
  return wide;
}

/// Half a unit in the last place: what rounding the exact result costs at most, relatively.
inline double rounding(c10::ScalarType type) {
  return type == at::kBFloat16 ? 0x1p-8 : type == at::kHalf ? 0x1p-11 : type == at::kFloat ? 0x1p-24 : 0x1p-53;
}

/// Each element within `roundings` roundings to its dtype, and what fp32 arithmetic may lose of the largest one, or of 1.
inline ::testing::AssertionResult is_rounded(const at::Tensor& got, const at::Tensor& want, double roundings = 1.01) {
  if (got.defined() != want.defined())
    return ::testing::AssertionFailure() << "one is undefined: " << got.defined() << want.defined();
  if (!got.defined() || got.numel() == 0) return ::testing::AssertionSuccess();
  if (got.sizes() != want.sizes()) return ::testing::AssertionFailure() << "sizes " << got.sizes() << " and " << want.sizes();
  const double arithmetic = got.scalar_type() == at::kDouble ? 1e-14 : 3e-6, least = got.scalar_type() == at::kHalf ? 0x1p-25 : 0;
  auto exact = in_double(want), error = (in_double(got) - exact).abs();
  auto bound = exact.abs() * (roundings * rounding(got.scalar_type())) + (exact.abs().max().clamp_min(1) * arithmetic + least);
  auto excess = (error / bound).max().item<double>();
  if (excess <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got.scalar_type() << ": error is " << excess << " times the bound, largest error "
                                       << error.max().item<double>() << " of " << exact.abs().max().item<double>();
}

inline void expect_rounded(const Outcome& got, const Outcome& want, double roundings = 1.01) {
  ASSERT_EQ(got.outputs.size(), want.outputs.size());
  for (size_t i = 0; i < got.outputs.size(); ++i)
    EXPECT_TRUE(is_rounded(got.outputs[i], want.outputs[i], roundings)) << "output " << i;
  for (size_t i = 0; i < got.gradients.size(); ++i)
    EXPECT_TRUE(is_rounded(got.gradients[i], want.gradients[i], roundings)) << "gradient " << i;
}

// Products of 16-bit numbers: several roundings on the way, the largest of sums counts.
inline double tolerance(c10::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 3e-6 : 8 * rounding(type);
}

inline void expect_close(const Outcome& got, const Outcome& want, double tolerance) {
  auto close = [&](const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0) return a.sizes() == b.sizes();
    return (in_double(a) - b).abs().max().item<double>() <= tolerance * (b.abs().max().item<double>() + 1e-3);
  };
  EXPECT_TRUE(close(got.outputs[0], want.outputs[0]));
  for (size_t i = 0; i < got.gradients.size(); ++i)
    EXPECT_TRUE(close(got.gradients[i], want.gradients[i])) << "gradient " << i;
}

inline std::vector<int64_t> with_last(std::vector<int64_t> shape, int64_t last) {
  shape.back() = last;
  return shape;
}

inline at::Tensor random(at::IntArrayRef sizes, c10::ScalarType type, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed)).to(type);
}

inline constexpr c10::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

}  // namespace fsdpp::test

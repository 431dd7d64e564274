// Products with SiLU in them against products and activations in double.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>

#include "comm/collective_use.h"
#include "fsdpp/ops/mlp.h"
#include "kernels/silu_product.h"
#include "ops/fused_silu.h"
#include "ops/silu_product.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

class SiluProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) FAIL() << "this program needs a GPU";
    if (!kernels::has_silu_products()) GTEST_SKIP() << "built without CUTLASS";
    const auto* gpu = at::cuda::getDeviceProperties(0);
    if (gpu->major != 9 || gpu->minor != 0) GTEST_SKIP() << "for GPUs of compute capability 9.0";
    ASSERT_TRUE(ops::fused_silu_takes(half({4096, 64}, at::kBFloat16, 1), half({2048, 64}, at::kBFloat16, 1), 2048));
  }
  static at::Tensor half(at::IntArrayRef sizes, c10::ScalarType type, uint64_t seed, double scale = 1) {
    return (random(sizes, at::kFloat, seed) * scale).to(type).cuda();
  }
};

struct Sizes {
  int64_t rows, in, width;
};
// No tile divides the second one.
constexpr Sizes kSizes[] = {{4096, 512, 2048}, {4104, 264, 3080}};

TEST_F(SiluProducts, GiveTheProductAndItsActivation) {
  for (auto type : {at::kBFloat16, at::kHalf})
    for (auto [rows, in, width] : kSizes) {
      const auto x = half({rows, in}, type, 1),
                 weight = half({width, in}, type, 2, 2 / std::sqrt(static_cast<double>(in)));
      auto h = at::full({rows, width}, NAN, x.options()), a = at::full({rows, width}, NAN, x.options());
      ASSERT_TRUE(ops::fused_silu_takes(x, weight, width));
      ops::fused_silu(h, a, x, weight);
      EXPECT_TRUE(is_rounded(h, at::linear(in_double(x), in_double(weight)), 1.1));
      EXPECT_TRUE(at::equal(a, ops::activate(h, {}))) << "bits of the kernel's silu";
    }
}

TEST_F(SiluProducts, GiveTheGradientAndTheActivationAgain) {
  for (auto type : {at::kBFloat16, at::kHalf})
    for (auto [rows, out, width] : kSizes)
      for (bool wants_a : {true, false}) {
        const auto grad = half({rows, out}, type, 1),
                   weight = half({out, width}, type, 2, 1 / std::sqrt(static_cast<double>(out)));
        const auto h = half({rows, width}, type, 3, 3);
        const auto got = ops::activation_gradients(grad, weight, h, {}, wants_a);
        const auto s = at::sigmoid(in_double(h)), derivative = s * (1 + in_double(h) * (1 - s));
        const double roundings =
            wants_a ? 1.2 : 2.2;  // without it, the product is stored before the activation's kernel
        EXPECT_TRUE(is_rounded(got.h, at::mm(in_double(grad), in_double(weight)) * derivative, roundings));
        ASSERT_EQ(got.out.defined(), wants_a);
        EXPECT_TRUE(!wants_a || at::equal(got.out, ops::activate(h, {})));
      }
}

TEST_F(SiluProducts, MakeAnMlpAsItWouldBeWithout) {
  Tensors in{half({2, 2048, 512}, at::kBFloat16, 1), half({2048, 512}, at::kBFloat16, 2, 0.05),
             half({512, 2048}, at::kBFloat16, 3, 0.03)};
  const auto grad = half({2, 2048, 512}, at::kBFloat16, 4);
  auto fused = [](const Tensors& t) { return Tensors{ops::silu_mlp(t[0], t[1], t[2])}; };
  auto plain = [](const Tensors& t) { return Tensors{at::linear(at::silu(at::linear(t[0], t[1])), t[2])}; };
  expect_close(outcome_of(fused, in, {grad}), outcome_of(plain, in_double(in), {in_double(grad)}),
               4 * tolerance(at::kBFloat16));
}

TEST_F(SiluProducts, HaveTheSameBitsBesideCollectives) {
  const auto x = half({4104, 264}, at::kBFloat16, 1), weight = half({3080, 264}, at::kBFloat16, 2, 0.1);
  const auto want = ops::activated_product(x, weight, {});
  const comm::CollectiveUse use;
  const auto got = ops::activated_product(x, weight, {});
  EXPECT_TRUE(at::equal(got.h, want.h));
  EXPECT_TRUE(at::equal(got.out, want.out));
}

TEST_F(SiluProducts, LeaveSmallAndOddOnesToOthers) {
  EXPECT_FALSE(ops::fused_silu_takes(half({256, 64}, at::kBFloat16, 1), half({64, 64}, at::kBFloat16, 1), 64));
  EXPECT_FALSE(ops::fused_silu_takes(half({4096, 68}, at::kBFloat16, 1), half({2048, 68}, at::kBFloat16, 1), 2048));
  EXPECT_FALSE(ops::fused_silu_takes(half({4096, 64}, at::kBFloat16, 1).to(at::kFloat),
                                     half({2048, 64}, at::kBFloat16, 1), 2048));
  EXPECT_FALSE(ops::fused_silu_takes(half({64, 4096}, at::kBFloat16, 1).t(), half({2048, 64}, at::kBFloat16, 1), 2048));
}

}  // namespace
}  // namespace fsdpp::test

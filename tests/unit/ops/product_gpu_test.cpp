// Products by cuBLASLt against LibTorch's in double.
#include <ATen/Context.h>

#include "comm/collective_use.h"
#include "fsdpp/base/error.h"
#include "fsdpp/cuda/graph.h"
#include "fsdpp/ops/linear.h"
#include "ops/cublas_product.h"
#include "ops/product.h"
#include "support/tiny_models.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

at::Tensor on_gpu(at::IntArrayRef sizes, c10::ScalarType type, uint64_t seed) {
  return random(sizes, type, seed).cuda();
}
at::Tensor by_columns(const at::Tensor& t) { return t.t().contiguous().t(); }

class CublasProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) FAIL() << "this program needs a GPU";
  }
};

struct Sizes {
  int64_t m, n, k;
};
// One tile; a split k; more tiles than processors, of sizes that no tile divides.
constexpr Sizes kSizes[] = {{8, 16, 24}, {64, 128, 8192}, {4104, 3080, 264}};

TEST_F(CublasProducts, AreRoundedOnceWhateverTheLayout) {
  for (auto type : {at::kBFloat16, at::kHalf})
    for (auto [m, n, k] : kSizes)
      for (bool a_rows : {true, false})
        for (bool b_rows : {true, false})
          for (bool wide : {false, true}) {
            auto a = on_gpu({m, k}, type, 1), b = on_gpu({k, n}, type, 2);
            if (!a_rows) a = by_columns(a);
            if (!b_rows) b = by_columns(b);
            auto out = at::full({m, n}, 7, a.options().dtype(wide ? at::kFloat : type));
            ASSERT_TRUE(ops::cublas_takes({.out = out, .a = a, .b = b, .bias = {}}));
            ops::product_into(out, a, b, /*accumulate=*/false);
            auto want = at::mm(in_double(a), in_double(b));
            EXPECT_TRUE(is_rounded(out, want, 1.1)) << m << " " << a_rows << b_rows << wide;
            ops::product_into(out, a, b, /*accumulate=*/true);
            EXPECT_TRUE(is_rounded(out, 2 * want, 3)) << m << " " << a_rows << b_rows << wide;
          }
}

TEST_F(CublasProducts, AreRoundedOnceBesideCollectivesToo) {
  const comm::CollectiveUse use;
  const auto a = on_gpu({4104, 264}, at::kBFloat16, 1), b = on_gpu({264, 3080}, at::kBFloat16, 2);
  EXPECT_TRUE(is_rounded(ops::product(a, b), at::mm(in_double(a), in_double(b)), 1.1));
}

TEST_F(CublasProducts, TakeWhatIsAlignedTo16BytesOnly) {
  const auto memory = on_gpu({2 * 2048 * 2048 + 8}, at::kBFloat16, 1);
  const auto a = memory.narrow(0, 8, 2048 * 2048).view({2048, 2048}), b = memory.narrow(0, 2048 * 2048 + 8, 2048 * 2048).view({2048, 2048});
  ASSERT_TRUE(ops::cublas_takes({.out = at::empty_like(a), .a = a, .b = b, .bias = {}}));
  EXPECT_TRUE(is_rounded(ops::product(a, b), at::mm(in_double(a), in_double(b)), 1.1));
}

TEST_F(CublasProducts, DoNotTakeMatricesThatDoNotFit) {
  const auto a = on_gpu({64, 32}, at::kBFloat16, 1), b = on_gpu({32, 48}, at::kBFloat16, 2), out = on_gpu({64, 48}, at::kBFloat16, 3);
  EXPECT_TRUE(ops::cublas_takes({.out = out, .a = a, .b = b, .bias = {}}));
  EXPECT_FALSE(ops::cublas_takes({.out = out.narrow(0, 0, 32), .a = a, .b = b, .bias = {}}));
  EXPECT_FALSE(ops::cublas_takes({.out = out, .a = a.narrow(1, 0, 16), .b = b, .bias = {}}));
  EXPECT_FALSE(ops::cublas_takes({.out = out, .a = a, .b = b, .bias = on_gpu({8}, at::kBFloat16, 4)}));
  EXPECT_FALSE(ops::cublas_takes_linear(a, b.t().contiguous(), on_gpu({1}, at::kBFloat16, 4)));
}

TEST_F(CublasProducts, TakePartsOfLargerMatrices) {
  auto a = on_gpu({64, 96}, at::kBFloat16, 1), b = on_gpu({96, 64}, at::kBFloat16, 2);
  auto whole = at::zeros({64, 64}, a.options().dtype(at::kFloat)), part = whole.narrow(1, 8, 40);
  ops::product_into(part, a.narrow(1, 16, 32), b.narrow(0, 16, 32).narrow(1, 24, 40), /*accumulate=*/false);
  EXPECT_TRUE(
      is_rounded(part, at::mm(in_double(a.narrow(1, 16, 32)), in_double(b.narrow(0, 16, 32).narrow(1, 24, 40)))));
  EXPECT_EQ(whole.narrow(1, 0, 8).abs().sum().item<float>() + whole.narrow(1, 48, 16).abs().sum().item<float>(), 0);
}

TEST_F(CublasProducts, LinearsHaveTheirBias) {
  for (bool biased : {false, true}) {
    auto x = on_gpu({3, 40, 72}, at::kBFloat16, 1), weight = on_gpu({48, 72}, at::kBFloat16, 2);
    auto bias = biased ? on_gpu({48}, at::kBFloat16, 3) : at::Tensor();
    ASSERT_TRUE(ops::cublas_takes_linear(x, weight, bias));
    auto want = at::linear(in_double(x), in_double(weight), biased ? std::optional(in_double(bias)) : std::nullopt);
    EXPECT_TRUE(is_rounded(ops::linear_product(x, weight, bias), want, 1.1));
  }
}

TEST_F(CublasProducts, WhatTheyDoNotTakeIsComputedAllTheSame) {
  auto ten = on_gpu({10, 10}, at::kBFloat16, 1), wide = on_gpu({16, 16}, at::kFloat, 2);
  auto shifted = on_gpu({257}, at::kBFloat16, 3).narrow(0, 1, 256).view({16, 16}),
       spread = on_gpu({32, 32}, at::kBFloat16, 4).slice(0, 0, 32, 2).slice(1, 0, 32, 2);
  constexpr double kLibTorchsRoundings = 16;  // its sums are what they are
  for (const auto& t : {ten, wide, shifted, spread}) {
    auto out = at::empty(t.sizes(), t.options());
    EXPECT_FALSE(ops::cublas_takes({.out = out, .a = t, .b = t, .bias = {}}));
    EXPECT_FALSE(ops::cublas_takes_linear(t, t, {}));
    EXPECT_TRUE(is_rounded(ops::product(t, t), at::mm(in_double(t), in_double(t)), kLibTorchsRoundings));
    EXPECT_TRUE(is_rounded(ops::linear_product(t, t, {}), at::linear(in_double(t), in_double(t)), kLibTorchsRoundings));
  }
}

TEST_F(CublasProducts, AreCaptured) {
  auto a = on_gpu({2048, 2048}, at::kBFloat16, 1), b = on_gpu({2048, 4096}, at::kBFloat16, 2);
  auto out = at::zeros({2048, 4096}, a.options().dtype(at::kFloat));
  cuda::Graph graph(out.device());
  graph.capture([&] { ops::product_into(out, a, b, /*accumulate=*/false); });
  EXPECT_EQ(out.abs().sum().item<float>(), 0);
  graph.replay();
  EXPECT_TRUE(is_rounded(out, at::mm(in_double(a), in_double(b)), 16));
}

struct ProbeImpl : torch::nn::Module {
  ProbeImpl() { w = register_parameter("w", at::ones({16, 8})); }
  at::Tensor forward(const at::Tensor& x) { return ops::linear(x, w); }
  at::Tensor w;
};
FSDPP_MODULE(Probe);

TEST_F(CublasProducts, AShardedParameterIsAnError) {
  auto world = comm::World::init({.device = c10::DeviceType::CUDA});
  Probe probe;
  probe->to(world->device());
  fully_shard(probe, comm::Mesh::shard(world),
              {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
  auto x = at::ones({4, 8}, at::dtype(at::kBFloat16).device(world->device()));
  EXPECT_EQ(probe(x).sum().item<float>(), 4 * 16 * 8);
  EXPECT_THROW((void)probe->forward(x), UsageError);
  at::NoGradGuard no_grad;
  EXPECT_THROW((void)probe->forward(x), UsageError);
}

}  // namespace
}  // namespace fsdpp::test

// test_fully_shard_mixed_precision.py: norms in low precision, and the buffers of those that have running statistics.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

template <class First, class Norm, class Last>
struct NormedImpl : torch::nn::Module {
  NormedImpl(First f, Norm n, Last l) : first(f), norm(n), last(l) {
    register_module("first", f);
    register_module("norm", n);
    register_module("last", l);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  Hooked<First> first;
  Hooked<Norm> norm;
  Hooked<Last> last;
};

// One step; buffers stay in fp32, and so do the weights of modules that have such statistics.
template <class First, class Norm, class Last>
void norm_step(const Rank& world, First first, Norm norm, Last last, at::IntArrayRef input, const MixedPrecisionPolicy& policy,
               const std::optional<MixedPrecisionPolicy>& norm_policy = std::nullopt) {
  using Net = fsdpp::ModuleHolder<NormedImpl<First, Norm, Last>>;
  Net net(std::make_shared<NormedImpl<First, Norm, Last>>(first, norm, last));
  net->to(world->device());
  auto mesh = Mesh::shard(world);
  fully_shard(net->norm, mesh, {.mp_policy = norm_policy.value_or(policy)});
  FullyShardOptions options{.mp_policy = policy};
  fully_shard(net->first, mesh, options), fully_shard(net->last, mesh, options), fully_shard(net, mesh, options);
  auto out = net(random_input(*world, input, 1));
  EXPECT_EQ(out.scalar_type(), *policy.param_dtype);
  out.sum().backward();
  for (auto& p : net->parameters()) EXPECT_TRUE(p.grad().defined());
  for (auto& b : net->named_buffers())
    EXPECT_TRUE(!b.value().is_floating_point() || b.value().scalar_type() == at::kFloat) << b.key();
}

torch::nn::Linear linear() { return torch::nn::Linear(8, 8); }
torch::nn::Conv2d conv(int64_t in, int64_t out) { return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3)); }

void norm_modules(const Rank& world, c10::ScalarType dtype) {
  MixedPrecisionPolicy policy{.param_dtype = dtype};
  norm_step(world, linear(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})), linear(), {4, 8}, policy);
  norm_step(world, linear(), torch::nn::BatchNorm1d(8), linear(), {4, 8}, policy);
  norm_step(world, conv(1, 5), torch::nn::BatchNorm2d(5), conv(5, 4), {3, 1, 9, 9}, policy);
  MixedPrecisionPolicy norm_policy{.output_dtype = dtype};
  norm_step(world, conv(1, 5), torch::nn::BatchNorm2d(5), conv(5, 4), {3, 1, 9, 9}, policy, norm_policy);
}

class MixedPrecisionNorm : public ::testing::TestWithParam<int> {};
TEST_P(MixedPrecisionNorm, NormModulesBf16) { each_rank(GetParam(), [](Rank world) { norm_modules(world, at::kBFloat16); }); }
TEST_P(MixedPrecisionNorm, NormModulesFp16) { each_rank(GetParam(), [](Rank world) { norm_modules(world, at::kHalf); }); }
INSTANTIATE_TEST_SUITE_P(Ranks, MixedPrecisionNorm, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace fsdpp::test::suite

// Attention by cuDNN from and to packed tensors, against LibTorch's use of cuDNN on tensors of their own. Skipped on
// GPUs where LibTorch has none.
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <thread>

#include "compare.h"
#include "fsdpp/api/checkpoint.h"
#include "fsdpp/api/step_graph.h"
#include "fsdpp/ops/attention.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/optim/sgd.h"
#include "ops/cudnn_attention.h"
#include "profiler/op_args.h"
#include "support/tiny_models.h"

namespace fsdpp::test {
namespace {

using ops::AttentionOptions;

struct Case {
  int64_t batch, seq, dim;
  AttentionOptions options;
  c10::ScalarType type = at::kBFloat16;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << " x " << c.seq << " x " << c.dim << ", heads " << c.options.heads
             << (c.options.causal ? ", causal" : "") << ", scale " << c.options.scale.value_or(0) << ", "
             << c10::toString(c.type);
}

class AttentionOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) FAIL() << "this program needs a GPU";
    if (!FSDPP_CUDNN) GTEST_SKIP() << "built without cuDNN";
    const auto* device = at::cuda::getDeviceProperties(0);
    if (device->major != 9 && device->major != 10) GTEST_SKIP() << "a GPU on which LibTorch's operator runs";
    ASSERT_TRUE(ops::cudnn_takes(at::empty({1, 64, 3 * 128}, at::device(at::kCUDA).dtype(at::kBFloat16)), {.heads = 1}, true));
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }
};

at::Tensor on_cuda(at::IntArrayRef sizes, c10::ScalarType type, uint64_t seed) {
  return random(sizes, at::kFloat, seed).to(at::kCUDA).to(type);
}
at::Tensor packed_of(const Case& c, uint64_t seed = 1) { return on_cuda({c.batch, c.seq, 3 * c.dim}, c.type, seed); }
at::Tensor gradient_of(const Case& c, uint64_t seed = 2) { return on_cuda({c.batch, c.seq, c.dim}, c.type, seed); }

Operator attention(const AttentionOptions& options) {
  return [=](const Tensors& in) { return Tensors{ops::attention(in[0], options)}; };
}

// LibTorch's cuDNN attention of query, key and value that are tensors of their own, in the order of tokens.
Operator libtorch_cudnn(const AttentionOptions& options) {
  return [=](const Tensors& in) {
    const auto batch = in[0].size(0), seq = in[0].size(1), dim = in[0].size(2) / 3;
    auto part = [&](int64_t i) {
      return in[0]
          .narrow(-1, i * dim, dim)
          .contiguous()
          .view({batch, seq, options.heads, dim / options.heads})
          .transpose(1, 2);
    };
    const auto result = at::_scaled_dot_product_cudnn_attention(part(0), part(1), part(2), {}, true, 0.0,
                                                                options.causal, false, options.scale);
    return Tensors{std::get<0>(result).transpose(1, 2).reshape({batch, seq, dim})};
  };
}

// The formula, in fp32 from the same numbers; a head at a time.
Operator exact(const AttentionOptions& options) {
  return [=](const Tensors& in) {
    auto parts = in[0].to(at::kFloat).unflatten(-1, {3, options.heads, -1}).transpose(-2, -4).unbind(-3);
    Tensors heads;
    for (int64_t h = 0; h < options.heads; ++h) {
      auto of = [&](int64_t i) { return parts[static_cast<size_t>(i)].select(-3, h); };
      auto scores = at::matmul(of(0), of(1).transpose(-1, -2)) *
                    options.scale.value_or(1 / std::sqrt(static_cast<double>(of(0).size(-1))));
      if (options.causal) scores = scores.masked_fill(at::ones_like(scores, at::kBool).triu(1), -INFINITY);
      heads.push_back(at::matmul(scores.softmax(-1), of(2)));
    }
    return Tensors{at::cat(heads, -1)};
  };
}

// The largest error of an element, as a part of its row's largest one, or of a usual row's where that is more: with a
// causal mask the first token's query has no gradient.
double row_error(const at::Tensor& got, const at::Tensor& want) {
  const auto wide = want.to(at::kFloat), largest = wide.abs().amax(-1, true);
  return ((got.to(at::kFloat) - wide).abs() / largest.maximum(largest.mean())).max().item<double>();
}

// As good as LibTorch's use of cuDNN, and close to it; says how many elements have other bits.
void expect_as_libtorchs(const at::Tensor& got, const at::Tensor& theirs, const at::Tensor& exactly, const char* what) {
  const double ours = row_error(got, exactly), others = row_error(theirs, exactly), apart = row_error(got, theirs);
  std::printf(
      "%-10s error of the row's largest: %.2e, LibTorch's %.2e; apart %.2e, %ld of %ld elements have other bits\n",
      what, ours, others, apart, static_cast<long>(got.ne(theirs).sum().item<int64_t>()),
      static_cast<long>(got.numel()));
  const double ulp = rounding(got.scalar_type());
  EXPECT_LE(ours, 1.2 * others + ulp) << what;
  EXPECT_LE(apart, 2 * others + 2 * ulp) << what;
}

TEST_F(AttentionOnCuda, IsLibTorchsUseOfCudnn) {
  const Case cases[] = {{8, 1024, 2048, {.heads = 16}},  // the seed's
                        {2, 1024, 2048, {.heads = 16, .causal = true}},
                        {1, 1000, 512, {.heads = 8, .causal = true}},
                        {3, 77, 256, {.heads = 4}},
                        {2, 130, 96, {.heads = 4, .scale = 0.5}},
                        {1, 256, 64, {.heads = 8}},  // 8 numbers a head
                        {2, 2, 128, {.heads = 1}},
                        {2, 512, 1024, {.heads = 8}, at::kHalf}};
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    std::printf("%s\n", ::testing::PrintToString(c).c_str());
    const auto qkv = packed_of(c), grad = gradient_of(c);
    EXPECT_TRUE(ops::cudnn_takes(qkv, c.options, true));
    const auto got = outcome_of(attention(c.options), {qkv}, {grad}),
               theirs = outcome_of(libtorch_cudnn(c.options), {qkv}, {grad});
    const auto want = outcome_of(exact(c.options), {qkv.to(at::kFloat)}, {grad.to(at::kFloat)});
    expect_as_libtorchs(got.outputs[0], theirs.outputs[0], want.outputs[0], "output");
    for (int64_t i = 0; i < 3; ++i) {
      auto part = [&](const Outcome& o) { return o.gradients[0].narrow(-1, i * c.dim, c.dim); };
      expect_as_libtorchs(part(got), part(theirs), part(want), i == 0 ? "d query" : i == 1 ? "d key" : "d value");
    }
    EXPECT_TRUE(got.outputs[0].is_contiguous() && got.gradients[0].is_contiguous());
  }
}

TEST_F(AttentionOnCuda, KeepsItsResultAndANumberForEachTokenAndHead) {
  const Case c{4, 512, 1024, {.heads = 8}};
  const auto qkv = packed_of(c).requires_grad_(), grad = gradient_of(c);
  auto bytes = [](bool peak) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0];
    return peak ? stats.peak : stats.current;
  };
  auto out = ops::attention(qkv, c.options);
  (void)torch::autograd::grad({out}, {qkv}, {grad});
  out.reset();
  const auto before = bytes(false);
  out = ops::attention(qkv, c.options);
  EXPECT_LE(bytes(false) - before, out.nbytes() + c.batch * c.seq * c.options.heads * 4 + 1024);
  const auto kept = bytes(false);
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  const auto gradient = torch::autograd::grad({out}, {qkv}, {grad})[0];
  const auto most = bytes(true) - kept;
  std::printf("backward takes %.2f tensors of the result's size, %.2f of them the gradient\n",
              static_cast<double>(most) / out.nbytes(), static_cast<double>(gradient.nbytes()) / out.nbytes());
  EXPECT_LE(most, static_cast<int64_t>(gradient.nbytes() + 2.2 * out.nbytes()));  // a sum in fp32, and small things
}

TEST_F(AttentionOnCuda, WithoutGradientHasTheSameBits) {
  const Case c{2, 256, 512, {.heads = 4}};
  const auto qkv = packed_of(c).requires_grad_();
  const auto recorded = ops::attention(qkv, c.options);
  at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(ops::attention(qkv, c.options), recorded));
}

TEST_F(AttentionOnCuda, ThatBeginsAnywhereInMemoryHasTheBitsOfOneThatIsAligned) {
  const Case c{2, 256, 512, {.heads = 4}};
  const auto qkv = packed_of(c), grad = gradient_of(c);
  auto shifted = [](const at::Tensor& t) {
    return at::constant_pad_nd(t.flatten(), {1, 0}).narrow(0, 1, t.numel()).view(t.sizes());
  };
  ASSERT_NE(reinterpret_cast<uintptr_t>(shifted(qkv).data_ptr()) % 16, 0U);
  at::globalContext().setDeterministicAlgorithms(true, true);
  const auto want = outcome_of(attention(c.options), {qkv}, {grad});
  auto of_shifted = [&](const Tensors& in) { return Tensors{ops::attention(shifted(in[0]), c.options)}; };
  const auto got = outcome_of(of_shifted, {qkv}, {shifted(grad)});
  EXPECT_TRUE(at::equal(got.outputs[0], want.outputs[0]));
  EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0]));
}

TEST_F(AttentionOnCuda, AskedForDeterministicKernelsGivesTheSameBitsEachTime) {
  const Case c{2, 512, 512, {.heads = 4, .causal = true}};
  const auto qkv = packed_of(c), grad = gradient_of(c);
  const auto want = outcome_of(exact(c.options), {qkv.to(at::kFloat)}, {grad.to(at::kFloat)}).gradients[0];
  at::globalContext().setDeterministicAlgorithms(true, true);
  EXPECT_TRUE(ops::cudnn_takes(qkv, c.options, true));
  const auto first = outcome_of(attention(c.options), {qkv}, {grad}).gradients[0];
  EXPECT_LE(row_error(first, want), 0.05);
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(at::equal(outcome_of(attention(c.options), {qkv}, {grad}).gradients[0], first));
}

TEST_F(AttentionOnCuda, OfWhatCudnnDoesNotTakeIsLibTorchs) {
  const Case cases[] = {{2, 64, 48, {.heads = 4}},   // 12 numbers a head
                        {2, 64, 256, {.heads = 1}},  // 256
                        {3, 1, 64, {.heads = 1}},    // nothing to attend to
                        {2, 64, 64, {.heads = 1}, at::kFloat},
                        {2, 64, 64, {.heads = 1}, at::kDouble}};
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    const auto qkv = packed_of(c), grad = gradient_of(c);
    EXPECT_FALSE(ops::cudnn_takes(qkv, c.options, false));
    const auto got = outcome_of(attention(c.options), {qkv}, {grad});
    const auto want = outcome_of(exact(c.options), {qkv.to(at::kFloat)}, {grad.to(at::kFloat)});
    EXPECT_LE(row_error(got.outputs[0], want.outputs[0]), 0.02);
    EXPECT_LE(row_error(got.gradients[0], want.gradients[0]), 0.05);
  }
}

TEST_F(AttentionOnCuda, SwitchedOffInLibTorchIsSwitchedOffHere) {
  const Case c{2, 64, 64, {.heads = 1}};
  at::globalContext().setSDPUseCuDNN(false);
  EXPECT_FALSE(ops::cudnn_takes(packed_of(c), c.options, false));
  at::globalContext().setSDPUseCuDNN(true);
  EXPECT_TRUE(ops::cudnn_takes(packed_of(c), c.options, false));
}

TEST_F(AttentionOnCuda, IsDifferentiableTwice) {
  const Case c{2, 32, 64, {.heads = 2, .causal = true}};
  auto second = [&](const Operator& op, const at::Tensor& from) {
    const auto x = from.detach().requires_grad_();
    const auto first =
        torch::autograd::grad({op({x})[0]}, {x}, {gradient_of(c).to(from.scalar_type())}, {}, /*create_graph=*/true)[0];
    return torch::autograd::grad({first}, {x}, {packed_of(c, 3).to(from.scalar_type())})[0];
  };
  EXPECT_LE(
      row_error(second(attention(c.options), packed_of(c)), second(exact(c.options), packed_of(c).to(at::kFloat))),
      0.1);
}

std::map<std::string, double> operations;

TEST_F(AttentionOnCuda, HasItsOperationsCountedByAProfiler) {
  auto seen = [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
    std::vector<profiler::Arg> args;
    for (const c10::IValue& value : fn.inputs())
      if (value.isTensor()) args.push_back(profiler::Arg::tensor(value.toTensor().sizes().vec()));
    const std::string name = fn.name();
    if (name.starts_with("fsdpp::attention")) operations[name] += profiler::flops_of(name, args);
    return nullptr;
  };
  const Case c{2, 256, 512, {.heads = 4}};
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback(seen).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  (void)outcome_of(attention(c.options), {packed_of(c)}, {gradient_of(c)});
  at::removeCallback(handle);
  const double product = 2.0 * 2 * 256 * 256 * 512;
  EXPECT_EQ(operations, (std::map<std::string, double>{{"fsdpp::attention", 2 * product},
                                                       {"fsdpp::attention_gradient", 5 * product}}));
}

TEST_F(AttentionOnCuda, RecomputedGivesTheSameGradients) {
  const Case c{2, 256, 512, {.heads = 4}};
  at::globalContext().setDeterministicAlgorithms(true, true);
  auto again = [&](const Tensors& in) {
    return Tensors{checkpoint([&](const at::Tensor& t) { return ops::attention(t, c.options); }, in[0])};
  };
  const auto qkv = packed_of(c), grad = gradient_of(c);
  EXPECT_TRUE(at::equal(outcome_of(again, {qkv}, {grad}).gradients[0],
                        outcome_of(attention(c.options), {qkv}, {grad}).gradients[0]));
}

TEST_F(AttentionOnCuda, OnTwoThreadsWithStreamsOfTheirOwnIsRightOnBoth) {
  const Case c{2, 384, 512, {.heads = 4}};
  at::globalContext().setDeterministicAlgorithms(true, true);
  auto run = [&](uint64_t seed) {
    return outcome_of(attention(c.options), {packed_of(c, seed)}, {gradient_of(c, seed)}).gradients[0];
  };
  const at::Tensor want[] = {run(1), run(2)};
  cudaDeviceSynchronize();
  int wrong[] = {0, 0};
  auto work = [&](int i) {
    const auto stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard guard(stream);
    for (int turn = 0; turn < 20; ++turn) wrong[i] += at::equal(run(static_cast<uint64_t>(i + 1)), want[i]) ? 0 : 1;
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(wrong[0] + wrong[1], 0);
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t dim) { weight = register_parameter("weight", at::zeros({3 * dim, dim})); }
  at::Tensor forward(const at::Tensor& x) {
    return ops::attention(ops::linear(x, weight), {.heads = 4}).to(at::kFloat).square().mean();
  }
  at::Tensor weight;
};
FSDPP_MODULE(Net);

TEST_F(AttentionOnCuda, InAStepGraphTrainsToTheBitsOfStepsWithoutOne) {
  at::globalContext().setDeterministicAlgorithms(true, true);
  auto trained = [](bool with_graph) {
    Net net(256);
    fill_parameters(*net, 3);
    net->to(at::kCUDA, at::kBFloat16);
    optim::SGD sgd(*net, {.lr = 10});
    const auto x = at::zeros({2, 128, 256}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
    auto step = [&] {
      sgd.zero_grad();
      auto loss = net(x);
      loss.backward();
      sgd.step();
      return loss.detach();
    };
    StepGraph graph(*net, step);
    std::vector<double> losses;
    for (uint64_t i = 0; i < 12; ++i) {
      x.copy_(on_cuda({2, 128, 256}, at::kBFloat16, 100 + i));
      losses.push_back((with_graph ? graph() : step()).item<double>());
    }
    EXPECT_EQ(graph.captured(), with_graph);
    return std::make_pair(losses, net->weight.detach().clone());
  };
  const auto want = trained(false), got = trained(true);
  EXPECT_EQ(got.first, want.first);
  EXPECT_NE(want.first.front(), want.first.back());
  EXPECT_TRUE(at::equal(got.second, want.second));
}

}  // namespace
}  // namespace fsdpp::test

// embedding against LibTorch's, in double from the same inputs.
#include "fsdpp/ops/embedding.h"

#include <gmock/gmock.h>

#include "fsdpp/api/checkpoint.h"
#include "fsdpp/base/error.h"
#include "unit/ops/compare.h"

namespace fsdpp::test {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kVocab = 19;

Tensors embedded(const at::Tensor& ids, const Tensors& in, int64_t padding = -1) {
  return {ops::embedding(ids, in[0], {.padding_idx = padding})};
}
Tensors embedded_exactly(const at::Tensor& ids, const Tensors& in, int64_t padding = -1) {
  return {at::embedding(in[0], ids, padding)};
}

// Few values, so that many are repeated.
at::Tensor ids_of(at::IntArrayRef shape, uint64_t seed = 1) {
  return at::randint(kVocab / 2, shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong)).square() %
         kVocab;
}

TEST(Embedding, EqualsLibTorchsInAllTypesAndShapes) {
  const std::vector<std::vector<int64_t>> shapes{{}, {1}, {7}, {0}, {3, 0, 2}, {2, 5}, {4, 3, 50}};
  for (auto type : kTypes)
    for (auto& shape : shapes)
      for (int64_t dim : {1, 7, 64})
        for (int64_t padding : {-1, 4}) {
          auto sizes = shape;
          sizes.push_back(dim);
          const auto ids = ids_of(shape);
          Tensors in{random({kVocab, dim}, type, 2)}, grads{random(sizes, type, 3)};
          SCOPED_TRACE(::testing::Message() << type << " " << shape << " x " << dim << " padding " << padding);
          auto got = outcome_of([&](auto& t) { return embedded(ids, t, padding); }, in, grads);
          auto want =
              outcome_of([&](auto& t) { return embedded_exactly(ids, t, padding); }, in_double(in), in_double(grads));
          EXPECT_TRUE(at::equal(in_double(got.outputs[0]), want.outputs[0]));
          expect_rounded(got, want);
        }
}

TEST(Embedding, OfFewEqualIdsItsGradientHasTheBitsOfLibTorchs) {
  const auto ids = ids_of({3, 20});
  Tensors in{random({kVocab, 9}, at::kFloat, 2)}, grads{random({3, 20, 9}, at::kFloat, 3)};
  auto got = outcome_of([&](auto& t) { return embedded(ids, t); }, in, grads);
  auto want = outcome_of([&](auto& t) { return embedded_exactly(ids, t); }, in, grads);
  EXPECT_LE(ids.view({-1}).bincount().max().item<int64_t>(), 32);
  EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0]));
}

TEST(Embedding, TakesInt32IdsAndNonContiguousTensors) {
  const auto ids = ids_of({6, 5}).t(), table = random({9, kVocab}, at::kFloat, 2).t();
  Tensors in{table}, grads{random({9}, at::kFloat, 3).expand({5, 6, 9})};
  auto got = outcome_of([&](auto& t) { return embedded(ids.to(at::kInt), t); }, in, grads);
  auto want = outcome_of([&](auto& t) { return embedded_exactly(ids, t); }, in_double(in), in_double(grads));
  expect_rounded(got, want);
}

TEST(Embedding, GradientsOfSeveralMicroBatchesAddUp) {
  auto weight = random({kVocab, 8}, at::kFloat, 2).requires_grad_(),
       reference = weight.detach().clone().requires_grad_();
  for (uint64_t micro = 0; micro < 3; ++micro) {
    const auto ids = ids_of({2, 6}, micro), grad = random({2, 6, 8}, at::kFloat, 10 + micro);
    ops::embedding(ids, weight).backward(grad);
    at::embedding(reference, ids).backward(grad);
  }
  EXPECT_TRUE(at::equal(weight.grad(), reference.grad()));
}

TEST(Embedding, UsedTwiceInOneBackwardGetsBothGradients) {
  auto weight = random({kVocab, 8}, at::kDouble, 2).requires_grad_();
  const auto a = ids_of({5}, 1), b = ids_of({7}, 2);
  auto loss = [&](auto embed) { return embed(a).sum() + (embed(b) * 3).sum(); };
  auto got = torch::autograd::grad({loss([&](auto& ids) { return ops::embedding(ids, weight); })}, {weight});
  auto want = torch::autograd::grad({loss([&](auto& ids) { return at::embedding(weight, ids); })}, {weight});
  EXPECT_TRUE(at::allclose(got[0], want[0]));
}

TEST(Embedding, RecordsOnlyWhereAGradientIsWanted) {
  auto weight = random({kVocab, 4}, at::kFloat, 2);
  EXPECT_FALSE(ops::embedding(ids_of({3}), weight).requires_grad());
  weight.requires_grad_();
  EXPECT_TRUE(ops::embedding(ids_of({3}), weight).requires_grad());
  at::NoGradGuard no_grad;
  EXPECT_FALSE(ops::embedding(ids_of({3}), weight).requires_grad());
}

TEST(Embedding, KeepsNothingButIdsAndTable) {
  auto weight = random({kVocab, 4}, at::kFloat, 2).requires_grad_();
  const auto ids = ids_of({3});
  auto y = ops::embedding(ids, weight);
  EXPECT_EQ(y.use_count(), 1);
  y.sum().backward();
  EXPECT_THROW(y.sum().backward(), c10::Error);  // a graph whose results are not kept can't be run again
}

TEST(Embedding, InsideACheckpointHasTheSameGradient) {
  auto weight = random({kVocab, 4}, at::kFloat, 2).requires_grad_();
  const auto ids = ids_of({11});
  auto scale = at::ones({4}).requires_grad_();
  auto run = [&](const at::Tensor& s) { return (ops::embedding(ids, weight) * s).square(); };
  checkpoint(run, scale).sum().backward();
  auto got = weight.grad().clone();
  weight.mutable_grad().reset();
  run(scale).sum().backward();
  EXPECT_TRUE(at::equal(got, weight.grad()));
}

TEST(Embedding, MisuseIsAnErrorThatNamesTheWayOut) {
  const auto weight = random({kVocab, 4}, at::kFloat, 2).requires_grad_(), ids = ids_of({3});
  auto fails = [](auto call, const char* text) { EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(text))); };
  fails([&] { (void)ops::embedding(at::tensor({0, 19}, at::kLong), weight); }, "expected ids in [0, 19)");
  fails([&] { (void)ops::embedding(at::tensor({0, 19}, at::kLong), weight); }, "got 19 for token 1");
  fails([&] { (void)ops::embedding(at::tensor({-1}, at::kInt), weight); }, "got -1 for token 0");
  fails([&] { (void)ops::embedding(at::ones({2}), weight); }, "expected ids of int64 or int32 on cpu, got Float");
  fails([&] { (void)ops::embedding(ids, at::ones({19})); }, "[vocab, dim], got [19]");
  fails([&] { (void)ops::embedding(ids, at::ones({19, 2}, at::kLong)); }, "got Long");
  fails([&] { (void)ops::embedding(ids, weight, {.padding_idx = 19}); },
        "padding_idx of -1 (none) or in [0, 19), got 19");
  fails([&] { (void)ops::embedding(ids, weight, {.padding_idx = -2}); }, "got -2");
  auto y = ops::embedding(ids, weight).sum();
  fails([&] { torch::autograd::grad({y}, {weight}, {}, /*retain_graph=*/true, /*create_graph=*/true); },
        "at::embedding");
}

TEST(Embedding, ItsTableMayBeUpdatedBeforeBackward) {
  auto weight = random({5, 3}, at::kFloat, 1).requires_grad_();
  auto y = ops::embedding(at::tensor({1, 4, 1}, at::kLong), weight).sum();
  {
    at::NoGradGuard no_grad;
    weight.add_(1);
  }
  y.backward();
  EXPECT_TRUE(at::equal(weight.grad().sum(1), at::tensor({0.0F, 6.0F, 0.0F, 0.0F, 3.0F})));
}

}  // namespace
}  // namespace fsdpp::test

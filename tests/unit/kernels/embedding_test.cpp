#include "kernels/embedding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "unit/kernels/torch_types.h"
#include "unit/kernels/zipf_ids.h"

namespace fsdpp::kernels {
namespace {

using Ids = std::vector<int64_t>;

DType dtype_of(const at::Tensor& t) {
  for (const DType dtype : kAllDTypes)
    if (torch_dtype(dtype) == t.scalar_type()) return dtype;
  return DType::F32;
}

void sum(const at::Tensor& grad, const Ids& ids, const at::Tensor& out, bool accumulate = false,
         int64_t padding_idx = -1) {
  EmbeddingBackwardArgs args{
      .grad = grad.data_ptr(), .dtype = dtype_of(grad), .ids = ids.data(), .out = out.data_ptr()};
  args.out_dtype = dtype_of(out), args.accumulate = accumulate, args.padding_idx = padding_idx;
  args.tokens = static_cast<int64_t>(ids.size()), args.vocab = out.size(0), args.dim = out.size(1);
  embedding_backward_cpu(args);
}

// Token by token, in double.
at::Tensor plain_sums(const at::Tensor& grad, const Ids& ids, int64_t vocab, int64_t padding_idx = -1) {
  const at::Tensor sums = at::zeros({vocab, grad.size(1)}, at::kDouble);
  for (size_t t = 0; t < ids.size(); ++t)
    if (ids[t] != padding_idx) sums[ids[t]].add_(grad[static_cast<int64_t>(t)].to(at::kDouble));
  return sums;
}

// Small integers: every order of additions gives the same sum, if it is not in 16 bits.
TEST(EmbeddingBackward, IsExactInEveryPairOfDtypes) {
  constexpr int64_t kVocab = 37, kTokens = 150;
  const Ids ids = zipf_ids(kTokens, kVocab, 1);
  for (const DType dtype : kAllDTypes)
    for (const DType out_dtype : kAllDTypes)
      for (const int64_t dim : {1, 7, 512, 2047}) {
        const at::Tensor grad = at::randint(-9, 10, {kTokens, dim}, torch_dtype(dtype));
        const at::Tensor before = at::randint(-9, 10, {kVocab, dim}, torch_dtype(out_dtype)), out = before.clone();
        const at::Tensor exact = plain_sums(grad, ids, kVocab);
        sum(grad, ids, out, /*accumulate=*/true);
        ASSERT_TRUE(at::equal(out, (exact + before).to(out.scalar_type()))) << name(dtype) << name(out_dtype) << dim;
        sum(grad, ids, out);
        ASSERT_TRUE(at::equal(out, exact.to(out.scalar_type()))) << name(dtype) << name(out_dtype) << dim;
      }
}

TEST(EmbeddingBackward, SumsInTokenOrderInRuns) {
  for (const int64_t tokens : {1, 2, 31, 32, 33, 64, 65, 700}) {
    const at::Tensor grad = at::randn({tokens, 5}), out = at::empty({3, 5}), want = at::zeros({3, 5});
    sum(grad, Ids(static_cast<size_t>(tokens), 1), out);
    for (int64_t begin = 0; begin < tokens; begin += kEmbeddingRun) {
      const at::Tensor run = at::zeros({5});
      for (int64_t t = begin; t < std::min(begin + kEmbeddingRun, tokens); ++t) run.add_(grad[t]);
      want[1].add_(run);
    }
    EXPECT_TRUE(at::equal(out, want)) << tokens;
  }
}

TEST(EmbeddingBackward, OfManyTokensIsAsExactAsItsType) {
  const Ids ids = zipf_ids(20011, 11, 2);
  const at::Tensor grad = at::randn({20011, 3}), out = at::empty({11, 3}), half = grad.to(at::kBFloat16);
  sum(grad, ids, out);
  EXPECT_LT((out.to(at::kDouble) - plain_sums(grad, ids, 11)).abs().max().item<double>(), 1e-3);
  sum(half, ids, out);
  EXPECT_LT((out.to(at::kDouble) - plain_sums(half, ids, 11)).abs().max().item<double>(), 1e-3);
}

TEST(EmbeddingBackward, RowsWithoutTokensBecomeZeroUnlessItAccumulates) {
  const at::Tensor grad = at::full({1, 2}, 2.0), out = at::full({3, 2}, 5.0);
  sum(grad, {1}, out, /*accumulate=*/true);
  EXPECT_TRUE(at::equal(out.select(1, 0), at::tensor({5.0F, 7.0F, 5.0F})));
  sum(grad, {1}, out);
  EXPECT_TRUE(at::equal(out.select(1, 1), at::tensor({0.0F, 2.0F, 0.0F})));
  sum(at::zeros({0, 2}), {}, out, /*accumulate=*/true);
  EXPECT_EQ(out.sum().item<float>(), 4.0F);
  sum(at::zeros({0, 2}), {}, out);
  EXPECT_EQ(out.abs().sum().item<float>(), 0.0F);
}

TEST(EmbeddingBackward, PaddingAndIdsOutsideTakeNoPart) {
  const Ids ids{2, -1, 0, 2, 3, 1, int64_t{1} << 40, -7, 1};
  const at::Tensor grad = at::full({9, 4}, 1.0), out = at::full({3, 4}, 5.0);
  sum(grad, ids, out, /*accumulate=*/false, /*padding_idx=*/2);
  EXPECT_TRUE(at::equal(out.select(1, 3), at::tensor({1.0F, 2.0F, 0.0F})));
  sum(grad, ids, out);
  EXPECT_TRUE(at::equal(out.select(1, 0), at::tensor({1.0F, 2.0F, 2.0F})));
}

}  // namespace
}  // namespace fsdpp::kernels

#include "kernels/embedding.h"

#include "unit/kernels/device_array.h"
#include "unit/kernels/zipf_ids.h"

/// The gradient of an embedding table against its CPU twin, bit for bit, with bytes around each output that must not
/// change.
namespace fsdpp::kernels {
namespace {

/// `shift`: elements off alignment.
struct TokenCase {
  DType dtype, out_dtype;
  int64_t tokens, vocab, dim, shift;
  std::string describe() const {
    return kernels::describe(dtype, out_dtype, tokens, shift) + " vocab " + std::to_string(vocab) + " dim " +
           std::to_string(dim);
  }
};

/// The gradient of a table on both sides.
struct TokenSums {
  TokenCase c;
  std::vector<int64_t> ids;
  Bytes grad, out;
  DeviceArray device_grad, device_out, device_ids, scratch;
  TokenSums(const TokenCase& given, const std::vector<int64_t>& of_tokens)
      : c(given),
        ids(of_tokens),
        grad(random_values(c.dtype, c.tokens * c.dim, 1)),
        out(random_values(c.out_dtype, c.vocab * c.dim, 2)),
        device_grad(c.dtype, c.tokens * c.dim, c.shift),
        device_out(c.out_dtype, c.vocab * c.dim, c.shift),
        device_ids(DType::F64, c.tokens, 1),
        scratch(DType::F64, static_cast<int64_t>((embedding_backward_scratch_bytes(c.tokens, c.vocab) + 7) / 8), 0) {
    device_grad.write(grad), device_out.write(out);
    const auto* bytes = reinterpret_cast<const unsigned char*>(ids.data());
    device_ids.write(Bytes(bytes, bytes + ids.size() * sizeof(int64_t)));
  }
  void run(bool accumulate = false, int64_t padding_idx = -1) {
    EmbeddingBackwardArgs host;
    host.dtype = c.dtype, host.out_dtype = c.out_dtype, host.accumulate = accumulate, host.padding_idx = padding_idx;
    host.tokens = c.tokens, host.vocab = c.vocab, host.dim = c.dim;
    EmbeddingBackwardArgs device = host;
    host.grad = grad.data(), host.ids = ids.data(), host.out = out.data();
    device.grad = device_grad.data(), device.ids = static_cast<const int64_t*>(device_ids.data());
    device.out = device_out.data(), device.scratch = scratch.data();
    embedding_backward_cpu(host);
    expect_success(embedding_backward(device, nullptr));
  }
  ::testing::AssertionResult same_as_cpu() const {
    if (const int64_t at = first_difference(device_out.read(), out, c.out_dtype); at >= 0)
      return ::testing::AssertionFailure() << c.describe() << ": row " << at / c.dim << " column " << at % c.dim;
    const bool guarded = device_out.guards_untouched() && scratch.guards_untouched() && device_grad.read() == grad;
    return guarded ? ::testing::AssertionSuccess()
                   : ::testing::AssertionFailure() << c.describe() << ": wrote elsewhere";
  }
};

TEST(EmbeddingGpu, BackwardHasTheBitsOfTheCpuInEveryPairOfDtypes) {
  int turn = 0;
  for (const DType dtype : kAll)
    for (const DType out_dtype : kAll)
      for (const int64_t dim : {1, 7, 8, 100, 512, 2047, 2048})
        for (const int64_t shift : {0, 1}) {
          ++turn;
          const int64_t tokens = turn % 2 == 0 ? 500 : 1300, vocab = turn % 3 == 0 ? 33 : 129;
          TokenSums sums({dtype, out_dtype, tokens, vocab, dim, shift},
                         zipf_ids(tokens, vocab, static_cast<uint32_t>(turn)));
          sums.run(turn % 5 < 2, turn % 7 == 0 ? 3 : -1);
          ASSERT_TRUE(sums.same_as_cpu());
        }
}

/// As in text; all one; each as often as the others; many outside the table.
std::vector<std::vector<int64_t>> kinds_of_ids(int64_t tokens, int64_t vocab) {
  const auto text = zipf_ids(tokens, vocab, 3);
  std::vector<std::vector<int64_t>> kinds{text, text, text, text};
  for (size_t t = 0; t < text.size(); ++t) {
    kinds[1][t] = vocab / 2;
    kinds[2][t] = static_cast<int64_t>(t * 7919 % static_cast<size_t>(vocab));
    if (t % 3 == 0) kinds[3][t] = t % 2 == 0 ? -1 - static_cast<int64_t>(t) : vocab + (int64_t{1} << (t % 60));
  }
  return kinds;
}

TEST(EmbeddingGpu, BackwardTakesAnyIds) {
  for (const int64_t tokens : {0, 1, 31, 33, 8191, 8192, 8193, 50000})
    for (const int64_t vocab : {1, 127, 128, 129, 3000, 300000})
      for (const auto& ids : kinds_of_ids(tokens, vocab))
        for (const bool accumulate : {false, true}) {
          TokenSums sums({DType::BF16, DType::F32, tokens, vocab, 4, 0}, ids);
          sums.run(accumulate, accumulate ? 0 : -1);
          ASSERT_TRUE(sums.same_as_cpu()) << (ids.empty() ? 0 : ids.back());
        }
}

TEST(EmbeddingGpu, BackwardOfManyTokensAndWideRowsRepeatsBitForBit) {
  TokenSums wide({DType::BF16, DType::F32, 8192, 32000, 512, 0}, zipf_ids(8192, 32000, 5));
  TokenSums equal({DType::BF16, DType::F32, 8192, 2000, 2048, 0}, std::vector<int64_t>(8192, 1999));
  TokenSums many({DType::F32, DType::F32, 1000003, 50000, 4, 0}, zipf_ids(1000003, 50000, 6));
  for (TokenSums* sums : {&wide, &equal, &many}) {
    sums->run();
    ASSERT_TRUE(sums->same_as_cpu());
    const Bytes first = sums->device_out.read();
    sums->run();
    ASSERT_TRUE(sums->device_out.read() == first) << "a second run differs: " << sums->c.describe();
  }
}

TEST(EmbeddingGpu, BackwardRefusesWhatItsNumbersCannotHold) {
  EmbeddingBackwardArgs args;
  args.tokens = 1, args.vocab = int64_t{1} << 31, args.dim = 1;
  EXPECT_NE(embedding_backward(args, nullptr), 0);
  args.vocab = 1, args.tokens = int64_t{1} << 31;
  EXPECT_NE(embedding_backward(args, nullptr), 0);
}

TEST(EmbeddingGpu, TheComparisonItselfCanFail) {
  TokenSums sums({DType::F32, DType::F32, 3, 5, 4, 0}, {1, 1, 4});
  sums.run();
  EXPECT_TRUE(sums.same_as_cpu());
  sums.out[16] ^= 1;
  EXPECT_FALSE(sums.same_as_cpu());
}

}  // namespace
}  // namespace fsdpp::kernels

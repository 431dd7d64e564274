#include "kernels/embedding.h"

#include <vector>

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

/// Tokens by row: those of row r are order[begin[r]] … order[begin[r + 1] - 1], in their own order.
struct Grouped {
  std::vector<int64_t> begin, order;
};

Grouped group_tokens(const EmbeddingBackwardArgs& a) {
  const auto row_of = [&](int64_t token) {
    const int64_t id = a.ids[token];
    return id >= 0 && id < a.vocab && id != a.padding_idx ? id : -1;
  };
  Grouped grouped{std::vector<int64_t>(static_cast<size_t>(a.vocab) + 1),
                  std::vector<int64_t>(static_cast<size_t>(a.tokens))};
  auto& begin = grouped.begin;
  for (int64_t t = 0; t < a.tokens; ++t)
    if (const int64_t r = row_of(t); r >= 0) ++begin[static_cast<size_t>(r) + 1];
  for (size_t r = 1; r < begin.size(); ++r) begin[r] += begin[r - 1];
  auto next = begin;
  for (int64_t t = 0; t < a.tokens; ++t)
    if (const int64_t r = row_of(t); r >= 0) grouped.order[static_cast<size_t>(next[static_cast<size_t>(r)]++)] = t;
  return grouped;
}

/// sums[0 … n) = the sums of the tokens' gradients from column `first` on.
template <class C>
void sum_tokens(const EmbeddingBackwardArgs& a, const int64_t* tokens, int64_t count, int64_t first, int64_t n,
                C* sums) {
  C values[cpu::kBlock];
  std::fill(sums, sums + n, C(0));
  for (int64_t begin = 0; begin < count; begin += kEmbeddingRun) {
    C run[cpu::kBlock] = {};
    for (int64_t k = begin; k < std::min(begin + kEmbeddingRun, count); ++k) {
      cpu::load(a.grad, a.dtype, tokens[k] * a.dim + first, n, values);
      for (int64_t i = 0; i < n; ++i) run[i] += values[i];
    }
    for (int64_t i = 0; i < n; ++i) sums[i] += run[i];
  }
}

/// Sums in C; what is there is added in Wide.
template <class C, class Wide>
void write_rows(const EmbeddingBackwardArgs& a) {
  const Grouped grouped = group_tokens(a);
  for (int64_t r = 0; r < a.vocab; ++r) {
    const int64_t begin = grouped.begin[static_cast<size_t>(r)],
                  count = grouped.begin[static_cast<size_t>(r) + 1] - begin;
    if (a.accumulate && count == 0) continue;
    cpu::for_blocks(a.dim, [&](int64_t first, int64_t n) {
      C sums[cpu::kBlock];
      Wide total[cpu::kBlock] = {};
      sum_tokens(a, grouped.order.data() + begin, count, first, n, sums);
      if (a.accumulate) cpu::load(a.out, a.out_dtype, r * a.dim + first, n, total);
      for (int64_t i = 0; i < n; ++i) total[i] += static_cast<Wide>(sums[i]);
      cpu::store(a.out, a.out_dtype, r * a.dim + first, n, total);
    });
  }
}

}  // namespace

void embedding_backward_cpu(const EmbeddingBackwardArgs& a) {
  if (a.dtype == DType::F64) return write_rows<double, double>(a);
  a.out_dtype == DType::F64 ? write_rows<float, double>(a) : write_rows<float, float>(a);
}

}  // namespace fsdpp::kernels

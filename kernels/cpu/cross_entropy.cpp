#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

/// The larger one; NaN if either is.
template <class C>
C nan_max(C a, C b) {
  return b > a || b != b ? b : a;
}

template <class C>
C log_sum_exp(const std::vector<C>& x) {
  C largest = -std::numeric_limits<C>::infinity();
  for (const C v : x) largest = nan_max(largest, v);
  double sum = 0;
  for (const C v : x) sum += static_cast<double>(std::exp(v - largest));
  return largest + static_cast<C>(std::log(sum));
}

template <class C>
void cross_entropy_row(const CrossEntropyArgs& a, int64_t r, std::vector<C>& row) {
  const int64_t target = a.targets[r];
  C& loss = static_cast<C*>(a.losses)[r];
  loss = 0;
  if (target == a.ignore_index) {
    std::fill(row.begin(), row.end(), C(0));
  } else {
    load(a.logits, a.dtype, r * a.vocab, a.vocab, row.data());
    const bool inside = target >= 0 && target < a.vocab;
    const C lse = inside ? log_sum_exp(row) : std::numeric_limits<C>::quiet_NaN();
    loss = inside ? lse - row[static_cast<size_t>(target)] : lse;
    if (!a.write_gradient) return;
    for (C& v : row) v = std::exp(v - lse);
    if (inside) row[static_cast<size_t>(target)] -= C(1);
    const C factor = a.factor ? static_cast<C>(*a.factor) : C(1);
    for (C& v : row) v *= factor;
  }
  if (a.write_gradient) store(a.logits, a.dtype, r * a.vocab, a.vocab, row.data());
}

template <class C>
void cross_entropy_rows(const CrossEntropyArgs& a) {
  std::vector<C> row(static_cast<size_t>(a.vocab));
  for (int64_t r = 0; r < a.rows; ++r) cross_entropy_row(a, r, row);
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyArgs& a) {
  a.dtype == DType::F64 ? cross_entropy_rows<double>(a) : cross_entropy_rows<float>(a);
}

void mean_factors_cpu(const MeanFactorsArgs& a) {
  const int64_t count = a.rows - std::count(a.targets, a.targets + a.rows, a.ignore_index);
  a.factors[0] = 1.0 / static_cast<double>(count);
  int64_t power = 1;
  while (power < count) power *= 2;
  a.factors[1] = 1.0 / static_cast<double>(power);
  a.factors[2] = static_cast<double>(power) / static_cast<double>(std::max<int64_t>(count, 1));
}

}  // namespace fsdpp::kernels

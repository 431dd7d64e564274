#include "kernels/column_sums.h"

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

template <class C>
void sum_columns(const ColumnSumsArgs& a) {
  cpu::for_blocks(a.columns, [&](int64_t begin, int64_t n) {
    double sums[cpu::kBlock] = {};
    C values[cpu::kBlock];
    if (a.accumulate) cpu::load(a.out, a.out_dtype, begin, n, sums);
    for (int64_t r = 0; r < a.rows; ++r) {
      cpu::load(a.x, a.dtype, r * a.columns + begin, n, values);
      for (int64_t i = 0; i < n; ++i) sums[i] += static_cast<double>(values[i]);
    }
    cpu::store(a.out, a.out_dtype, begin, n, sums);
  });
}

}  // namespace

void column_sums_cpu(const ColumnSumsArgs& a) {
  a.dtype == DType::F64 ? sum_columns<double>(a) : sum_columns<float>(a);
}

}  // namespace fsdpp::kernels

#include <cmath>
#include <limits>

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

constexpr int kLanes = 8;  // independent sums, so that the loop vectorises

/// The larger one; NaN if either is.
double nan_max(double a, double b) { return b > a || b != b ? b : a; }

template <class Term>
double sum_of(const double* x, int64_t n, Term&& term) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] += term(x[i + k]);
  }
  for (; i < n; ++i) lanes[i % kLanes] += term(x[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double power_sum(const double* x, int64_t n, double p) {
  if (p == 2.0) return sum_of(x, n, [](double v) { return v * v; });
  if (p == 1.0) return sum_of(x, n, [](double v) { return std::fabs(v); });
  return sum_of(x, n, [p](double v) { return std::pow(std::fabs(v), p); });
}

double largest(const double* x, int64_t n) {
  double result = 0;
  for (int64_t i = 0; i < n; ++i) result = nan_max(result, std::fabs(x[i]));
  return result;
}

}  // namespace

void norm_accumulate_cpu(const NormArgs& a) {
  double block[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.src, a.src_dtype, begin, n, block);
    *a.result = std::isinf(a.p) ? nan_max(*a.result, largest(block, n)) : *a.result + power_sum(block, n, a.p);
  });
}

}  // namespace fsdpp::kernels

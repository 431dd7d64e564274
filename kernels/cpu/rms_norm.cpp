#include "kernels/rms_norm.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

template <class C>
using Row = std::vector<C>;

template <class C>
Row<C> row_of(int64_t dim) {
  return Row<C>(static_cast<size_t>(dim));
}

template <class C>
C dot(const C* x, const C* y, int64_t n) {
  constexpr int kLanes = 16;  // independent sums, so that the loop vectorises
  C lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] += x[i + k] * y[i + k];
  }
  for (; i < n; ++i) lanes[i % kLanes] += x[i] * y[i];
  C sum = 0;
  for (const C lane : lanes) sum += lane;
  return sum;
}

/// The row that is normalised, as it reads back from memory.
template <class C>
void load_sum(const RmsNormArgs& a, int64_t begin, Row<C>& sum, Row<C>& other) {
  load(a.x, a.dtype, begin, a.dim, sum.data());
  if (a.residual == nullptr) return;
  load(a.residual, a.dtype, begin, a.dim, other.data());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
  store(a.sum, a.dtype, begin, a.dim, sum.data());
  load(a.sum, a.dtype, begin, a.dim, sum.data());
}

template <class C>
void forward(const RmsNormArgs& a) {
  Row<C> weight = row_of<C>(a.dim), sum = row_of<C>(a.dim), other = row_of<C>(a.dim);
  load(a.weight, a.dtype, 0, a.dim, weight.data());
  for (int64_t r = 0; r < a.rows; ++r) {
    load_sum(a, r * a.dim, sum, other);
    const C mean = dot(sum.data(), sum.data(), a.dim) / static_cast<C>(a.dim);
    const C rstd = C(1) / std::sqrt(mean + static_cast<C>(a.eps));
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] * rstd * weight[i];
    store(a.normed, a.dtype, r * a.dim, a.dim, sum.data());
    if (a.rstd != nullptr) static_cast<C*>(a.rstd)[r] = rstd;
  }
}

/// Adds a row's part to the weight's gradient, and turns `grad` into the gradient of the row.
template <class C>
void backward_row(const RmsNormBackwardArgs& a, C rstd, const Row<C>& weight, const Row<C>& sum, Row<C>& grad,
                  Row<double>& grad_weight) {
  for (size_t i = 0; i < sum.size(); ++i) grad_weight[i] += static_cast<double>(grad[i] * sum[i] * rstd);
  for (size_t i = 0; i < sum.size(); ++i) grad[i] *= weight[i];
  const C factor = dot(grad.data(), sum.data(), a.dim) / static_cast<C>(a.dim) * rstd * rstd;
  for (size_t i = 0; i < sum.size(); ++i) grad[i] = (grad[i] - sum[i] * factor) * rstd;
}

template <class C>
void backward(const RmsNormBackwardArgs& a) {
  Row<C> weight = row_of<C>(a.dim), sum = row_of<C>(a.dim), grad = row_of<C>(a.dim), other = row_of<C>(a.dim);
  Row<double> grad_weight = row_of<double>(a.dim);
  load(a.weight, a.dtype, 0, a.dim, weight.data());
  if (a.grad_weight != nullptr && a.accumulate) load(a.grad_weight, a.grad_weight_dtype, 0, a.dim, grad_weight.data());
  for (int64_t r = 0; r < a.rows; ++r) {
    load(a.sum, a.dtype, r * a.dim, a.dim, sum.data());
    load(a.grad_normed, a.dtype, r * a.dim, a.dim, grad.data());
    backward_row(a, static_cast<const C*>(a.rstd)[r], weight, sum, grad, grad_weight);
    if (a.grad_x == nullptr) continue;
    if (a.grad_sum != nullptr) {
      load(a.grad_sum, a.dtype, r * a.dim, a.dim, other.data());
      for (size_t i = 0; i < grad.size(); ++i) grad[i] += other[i];
    }
    store(a.grad_x, a.dtype, r * a.dim, a.dim, grad.data());
  }
  if (a.grad_weight != nullptr) store(a.grad_weight, a.grad_weight_dtype, 0, a.dim, grad_weight.data());
}

}  // namespace

void rms_norm_cpu(const RmsNormArgs& a) { a.dtype == DType::F64 ? forward<double>(a) : forward<float>(a); }
void rms_norm_backward_cpu(const RmsNormBackwardArgs& a) {
  a.dtype == DType::F64 ? backward<double>(a) : backward<float>(a);
}

}  // namespace fsdpp::kernels

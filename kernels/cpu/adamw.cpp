#include <cmath>
#include <new>

#include "kernels/cpu/blocks.h"
#include "kernels/optim_scalars.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

/// One block, in the order of operations of PyTorch's single-tensor AdamW.
template <bool kAmsgrad, class C>
void update(const AdamWScalars<C>& s, int64_t n, C* __restrict p, const C* __restrict grad, C* __restrict m,
            C* __restrict v, C* __restrict largest) {
  for (int64_t i = 0; i < n; ++i) {
    const C g = grad[i] * s.grad_scale;
    m[i] = m[i] * s.beta1 + g * s.one_minus_beta1;
    v[i] = v[i] * s.beta2 + s.one_minus_beta2 * g * g;
    C second = v[i];
    if constexpr (kAmsgrad) second = largest[i] = second > largest[i] || second != second ? second : largest[i];
    const C denominator = std::sqrt(second) / s.sqrt_bias_correction2 + s.eps;
    p[i] = p[i] * s.decay - s.step_size * m[i] / denominator;
  }
}

template <class C>
void adamw_as(const AdamWArgs& a) {
  const AdamWScalars<C> scalars(a);
  C param[kBlock];
  C grad[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.param, a.param_dtype, begin, n, param);
    load(a.grad, a.grad_dtype, begin, n, grad);
    C* m = static_cast<C*>(a.exp_avg) + begin;
    C* v = static_cast<C*>(a.exp_avg_sq) + begin;
    if (a.max_exp_avg_sq != nullptr) {
      update<true, C>(scalars, n, param, grad, m, v, static_cast<C*>(a.max_exp_avg_sq) + begin);
    } else {
      update<false, C>(scalars, n, param, grad, m, v, nullptr);
    }
    store(a.param, a.param_dtype, begin, n, param);
    if (a.cast != nullptr) store(a.cast, a.cast_dtype, begin, n, param);
  });
}

}  // namespace

void adamw_numbers(const AdamWArgs& a, void* out) {
  static_assert(sizeof(AdamWScalars<double>) <= kMaxNumbersBytes);
  if (a.param_dtype == DType::F64) {
    new (out) AdamWScalars<double>(a);
  } else {
    new (out) AdamWScalars<float>(a);
  }
}

void adamw_cpu(const AdamWArgs& a) {
  if (a.param_dtype == DType::F64) {
    adamw_as<double>(a);
  } else {
    adamw_as<float>(a);
  }
}

}  // namespace fsdpp::kernels

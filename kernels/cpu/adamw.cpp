#include <cmath>

#include "kernels/adamw_scalars.h"
#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

/// One block, in the order of operations of PyTorch's single-tensor AdamW.
template <class C>
void update(const AdamWScalars<C>& s, int64_t n, C* __restrict p, const C* __restrict grad, C* __restrict m,
            C* __restrict v) {
  for (int64_t i = 0; i < n; ++i) {
    const C g = grad[i] * s.grad_scale;
    m[i] = m[i] * s.beta1 + g * s.one_minus_beta1;
    v[i] = v[i] * s.beta2 + s.one_minus_beta2 * g * g;
    const C denominator = std::sqrt(v[i]) / s.sqrt_bias_correction2 + s.eps;
    p[i] = p[i] * s.decay - s.step_size * m[i] / denominator;
  }
}

template <class C>
void adamw_as(const AdamWArgs& a) {
  AdamWScalars<C> scalars(a);
  if (a.grad_scale_device != nullptr) scalars.grad_scale *= static_cast<C>(*a.grad_scale_device);
  C param[kBlock];
  C grad[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.param, a.param_dtype, begin, n, param);
    load(a.grad, a.grad_dtype, begin, n, grad);
    update<C>(scalars, n, param, grad, static_cast<C*>(a.exp_avg) + begin, static_cast<C*>(a.exp_avg_sq) + begin);
    store(a.param, a.param_dtype, begin, n, param);
    if (a.param_copy != nullptr) store(a.param_copy, a.copy_dtype, begin, n, param);
  });
}

}  // namespace

void adamw_cpu(const AdamWArgs& a) {
  if (a.param_dtype == DType::F64) {
    adamw_as<double>(a);
  } else {
    adamw_as<float>(a);
  }
}

}  // namespace fsdpp::kernels

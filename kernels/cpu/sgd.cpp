#include <new>

#include "kernels/cpu/blocks.h"
#include "kernels/optim_scalars.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

/// grad becomes the gradient of the decayed loss: without decay p is not read, it may be infinite.
template <class C>
void scale_and_decay(const SGDScalars<C>& s, int64_t n, const C* __restrict p, C* __restrict grad) {
  for (int64_t i = 0; i < n; ++i) grad[i] = grad[i] * s.grad_scale;
  if (s.weight_decay == 0) return;
  for (int64_t i = 0; i < n; ++i) grad[i] = grad[i] + s.weight_decay * p[i];
}

/// grad becomes the direction of the update.
template <class C>
void apply_momentum(const SGDScalars<C>& s, int64_t n, C* __restrict grad, C* __restrict buffer) {
  if (s.first) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = grad[i];
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = buffer[i] * s.momentum + grad[i] * s.one_minus_dampening;
  }
  for (int64_t i = 0; i < n; ++i) grad[i] = s.nesterov ? grad[i] + s.momentum * buffer[i] : buffer[i];
}

template <class C>
void sgd_as(const SGDArgs& a) {
  const SGDScalars<C> scalars(a);
  C param[kBlock];
  C grad[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.param, a.param_dtype, begin, n, param);
    load(a.grad, a.grad_dtype, begin, n, grad);
    scale_and_decay<C>(scalars, n, param, grad);
    if (a.momentum_buffer != nullptr) apply_momentum<C>(scalars, n, grad, static_cast<C*>(a.momentum_buffer) + begin);
    for (int64_t i = 0; i < n; ++i) param[i] = param[i] - scalars.lr * grad[i];
    store(a.param, a.param_dtype, begin, n, param);
  });
}

}  // namespace

void sgd_numbers(const SGDArgs& a, void* out) {
  static_assert(sizeof(SGDScalars<double>) <= kMaxNumbersBytes);
  if (a.param_dtype == DType::F64) {
    new (out) SGDScalars<double>(a);
  } else {
    new (out) SGDScalars<float>(a);
  }
}

void sgd_cpu(const SGDArgs& a) {
  if (a.param_dtype == DType::F64) {
    sgd_as<double>(a);
  } else {
    sgd_as<float>(a);
  }
}

}  // namespace fsdpp::kernels

#include "kernels/activation.h"

#include <cmath>

#include "kernels/cpu/blocks.h"

namespace fsdpp::kernels {
namespace {

using namespace cpu;

template <class C>
void forward(const SiluArgs& a) {
  C h[kBlock], up[kBlock];
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.h, a.dtype, begin, n, h);
    for (int64_t i = 0; i < n; ++i) h[i] *= C(1) / (C(1) + std::exp(-h[i]));
    if (a.up != nullptr) {
      load(a.up, a.dtype, begin, n, up);
      for (int64_t i = 0; i < n; ++i) h[i] *= up[i];
    }
    store(a.out, a.dtype, begin, n, h);
  });
}

template <class C>
void backward(const SiluBackwardArgs& a) {
  C h[kBlock], grad[kBlock], up[kBlock], out[kBlock], grad_up[kBlock];
  std::fill(up, up + kBlock, C(1));
  for_blocks(a.numel, [&](int64_t begin, int64_t n) {
    load(a.h, a.dtype, begin, n, h);
    load(a.grad_out, a.dtype, begin, n, grad);
    if (a.up != nullptr) load(a.up, a.dtype, begin, n, up);
    for (int64_t i = 0; i < n; ++i) {
      const C s = C(1) / (C(1) + std::exp(-h[i]));
      const C value = h[i] * s;
      out[i] = value * up[i];
      grad_up[i] = grad[i] * value;
      grad[i] = grad[i] * up[i] * (s * (C(1) + h[i] * (C(1) - s)));
    }
    store(a.grad_h, a.dtype, begin, n, grad);
    if (a.up != nullptr) store(a.grad_up, a.dtype, begin, n, grad_up);
    if (a.out != nullptr) store(a.out, a.dtype, begin, n, out);
  });
}

}  // namespace

void silu_cpu(const SiluArgs& a) { a.dtype == DType::F64 ? forward<double>(a) : forward<float>(a); }
void silu_backward_cpu(const SiluBackwardArgs& a) { a.dtype == DType::F64 ? backward<double>(a) : backward<float>(a); }

}  // namespace fsdpp::kernels

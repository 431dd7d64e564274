#pragma once
#include <cmath>

#include "kernels/kernels.h"

/// The numbers of one optimizer step, worked out in double and rounded once to the compute type C; both twins use them.
namespace fsdpp::kernels {

template <class C>
struct AdamWScalars {
  C decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, sqrt_bias_correction2, grad_scale;

  explicit AdamWScalars(const AdamWArgs& a)
      : decay(static_cast<C>(1.0 - a.lr * a.weight_decay)),
        beta1(static_cast<C>(a.beta1)),
        one_minus_beta1(static_cast<C>(1.0 - a.beta1)),
        beta2(static_cast<C>(a.beta2)),
        one_minus_beta2(static_cast<C>(1.0 - a.beta2)),
        eps(static_cast<C>(a.eps)),
        step_size(static_cast<C>(a.lr / (1.0 - std::pow(a.beta1, static_cast<double>(a.step))))),
        sqrt_bias_correction2(static_cast<C>(std::sqrt(1.0 - std::pow(a.beta2, static_cast<double>(a.step))))),
        grad_scale(static_cast<C>(a.grad_scale)) {}
};

template <class C>
struct SGDScalars {
  C lr, momentum, one_minus_dampening, weight_decay, grad_scale;
  bool nesterov, first;

  explicit SGDScalars(const SGDArgs& a)
      : lr(static_cast<C>(a.lr)),
        momentum(static_cast<C>(a.momentum)),
        one_minus_dampening(static_cast<C>(1.0 - a.dampening)),
        weight_decay(static_cast<C>(a.weight_decay)),
        grad_scale(static_cast<C>(a.grad_scale)),
        nesterov(a.nesterov),
        first(a.first) {}
};

}  // namespace fsdpp::kernels

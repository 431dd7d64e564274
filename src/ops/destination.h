#pragma once
#include <ATen/ops/empty.h>

#include "fsdpp/engine/gradient_target.h"

namespace fsdpp::ops {

/// Where a backward writes a parameter's gradient: its place in the gradient buffer, or memory of its own. Return `own`
/// to autograd: undefined in the first case, the gradient in the second.
struct Destination {
  /// `early`: what forward computed, shaped like the parameter; `out` is its memory where that is possible (see
  /// fsdpp::early_gradient).
  explicit Destination(const at::Tensor& parameter, const at::Tensor& early = {}) {
    if (take_target(parameter, early)) return;
    const bool fits = early.defined() && early.scalar_type() == parameter.scalar_type();
    out = own = fits ? early : at::empty(parameter.sizes(), parameter.options());
  }
  /// For a parameter that backward need not gather: `sizes` are those that it had in forward. If it is sharded now, a gradient of its own is
  /// of `options`.
  Destination(const at::Tensor& parameter, at::IntArrayRef sizes, const at::TensorOptions& options) {
    if (take_target(parameter, {})) return;
    out = own = at::empty(sizes, parameter.sizes() == sizes ? parameter.options() : options);
  }
  at::Tensor out;
  bool accumulate = false;  ///< add to `out`; else overwrite all of it
  at::Tensor own;

 private:
  bool take_target(const at::Tensor& parameter, const at::Tensor& early) {
    auto target = gradient_target(parameter, early);
    if (target) out = target->out, accumulate = target->accumulate;
    return target.has_value();
  }
};

}  // namespace fsdpp::ops

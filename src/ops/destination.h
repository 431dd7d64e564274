#pragma once
#include <ATen/ops/empty.h>

#include "fsdpp/engine/gradient_target.h"

namespace fsdpp::ops {

/// Where a backward writes a parameter's gradient: its place in the gradient buffer, or memory of its own. Return `own` to
/// autograd: undefined in the first case, the gradient in the second.
struct Destination {
  explicit Destination(const at::Tensor& parameter) {
    if (auto target = gradient_target(parameter)) {
      out = target->out;
      accumulate = target->accumulate;
    } else {
      out = own = at::empty(parameter.sizes(), parameter.options());
    }
  }
  at::Tensor out;
  bool accumulate = false;  ///< add to `out`; else overwrite all of it
  at::Tensor own;
};

}  // namespace fsdpp::ops

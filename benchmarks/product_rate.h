#pragma once
// The rate that MiniLLM's own matrix products reach when nothing else runs: the ceiling of its step.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "model.h"

namespace bench {

struct ProductRate {
  double ms_per_step = 0;  ///< all products of one step: forward, gradients of inputs and of weights
  double flops_per_s = 0;
};

/// Values of unit variance; each product repeated for `milliseconds_each`, so that clocks settle.
[[nodiscard]] ProductRate product_rate(const minillm::ModelConfig& model, int64_t tokens, c10::Device device,
                                       c10::ScalarType dtype, double milliseconds_each);

}  // namespace bench

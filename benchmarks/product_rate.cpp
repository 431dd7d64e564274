#include "product_rate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include "support/device.h"

namespace bench {
ProductRate product_rate(const minillm::ModelConfig& model, int64_t tokens, c10::Device device, c10::ScalarType dtype,
                         double milliseconds_each) {
  const at::NoGradGuard no_grad;
  const auto d = model.dim;
  struct Product {
    int64_t in, out, times;
  };
  const Product products[] = {
      {d, 3 * d, model.layers}, {d, d, model.layers}, {d, 4 * d, model.layers}, {4 * d, d, model.layers}, {d, model.vocab, 1}};
  const auto how = at::TensorOptions().dtype(dtype).device(device);
  ProductRate rate;
  double flops = 0;
  for (const auto& p : products) {
    const auto x = at::randn({tokens, p.in}, how), w = at::randn({p.out, p.in}, how), g = at::randn({tokens, p.out}, how);
    const double ms = milliseconds_of(device, milliseconds_each, [&] { at::linear(x, w); }) +
                      milliseconds_of(device, milliseconds_each, [&] { at::matmul(g, w); }) +
                      milliseconds_of(device, milliseconds_each, [&] { at::matmul(g.t(), x); });
    rate.ms_per_step += ms * static_cast<double>(p.times);
    flops += 6.0 * static_cast<double>(tokens * p.in * p.out * p.times);
  }
  rate.flops_per_s = flops / rate.ms_per_step * 1e3;
  return rate;
}

}  // namespace bench

#include "fsdpp/profiler/ceilings.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/randn.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <functional>

namespace fsdpp::profiler {
namespace {

constexpr int kInARow = 5;  // calls of one measurement: their launches hide behind the first
constexpr int kRepeats = 6;

/// Seconds of one call, the best of kRepeats rows.
double best_seconds(c10::Device device, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  const c10::impl::VirtualGuardImpl guard(device.type());
  for (int i = 0; i < kInARow; ++i) call();
  double best = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    guard.synchronizeDevice(device.index());
    const auto start = Clock::now();
    for (int i = 0; i < kInARow; ++i) call();
    guard.synchronizeDevice(device.index());
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / kInARow);
  }
  return best;
}

double flops_per_s(c10::Device device) {
  constexpr int64_t n = 8192;
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device);
  const at::Tensor a = at::randn({n, n}, options), b = at::randn({n, n}, options);
  at::Tensor out = at::empty({n, n}, options);
  return 2.0 * n * n * n / best_seconds(device, [&] { at::mm_out(out, a, b); });
}

double bytes_per_s(c10::Device device) {
  constexpr int64_t n = int64_t{1} << 28;
  const at::Tensor from = at::empty({n}, at::TensorOptions().dtype(at::kFloat).device(device)).zero_();
  at::Tensor to = at::empty_like(from);
  const double copied = best_seconds(device, [&] { to.copy_(from); });
  const double negated = best_seconds(device, [&] { at::neg_out(to, from); });
  return 2.0 * n * 4 / std::min(copied, negated);
}

}  // namespace

Ceilings measure_ceilings(int device) {
  const c10::Device where(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  const c10::DeviceGuard guard(where);
  return {flops_per_s(where), bytes_per_s(where), 0,
          "measured on this device (bf16 product of 8192 x 8192, copy of 1 GiB)"};
}

}  // namespace fsdpp::profiler

#pragma once
// What the benchmarks ask of the machine. Builds with and without CUDA.
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "fsdpp/cuda/stream.h"
#include "support/report.h"

namespace bench {

inline constexpr double kPeakFlops = 989e12;  ///< dense bf16 products of H100 SXM and H200, per second

/// GPU, driver, CUDA, LibTorch, compiler.
[[nodiscard]] Row machine(c10::Device device);

/// CUDA: LibTorch's caching allocator. Zeros on the CPU.
struct AllocatorStats {
  int64_t allocated = 0;      ///< bytes of tensors now
  int64_t peak = 0;           ///< most bytes of tensors at once since reset_peak
  int64_t reserved_peak = 0;  ///< most bytes taken from the device at once since reset_peak
  int64_t requested = 0;      ///< bytes that tensors asked for, now: blocks may be up to 1 MiB larger
  int64_t requested_peak = 0;  ///< most of these at once since reset_peak
  int64_t device_allocs = 0;  ///< cudaMalloc and its kin, since the process began
};
[[nodiscard]] AllocatorStats allocator_stats(c10::Device device);
void reset_peak(c10::Device device);
/// Gives back to the device what the allocator keeps for later.
void release_cached(c10::Device device);

/// Blocks until the device has finished what was queued. Nothing to do on the CPU.
void synchronize(c10::Device device);

/// Time between two points of a stream: CUDA events. On the CPU, where calls return when they are done: the clock.
class StreamTimer {
 public:
  explicit StreamTimer(c10::Device device);
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;
  void start(fsdpp::cuda::StreamView stream);
  void stop(fsdpp::cuda::StreamView stream);
  /// Blocks the host until the second point was passed.
  [[nodiscard]] double milliseconds() const;

 private:
  struct Events;
  std::unique_ptr<Events> events_;  ///< null on the CPU
  std::chrono::steady_clock::time_point start_{}, stop_{};
};

/// Of one of many calls on the current stream, repeated for about `least` milliseconds after a few to warm up.
[[nodiscard]] double milliseconds_of(c10::Device device, double least, const std::function<void()>& call);

[[nodiscard]] inline double milliseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

}  // namespace bench

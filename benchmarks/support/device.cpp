#include "support/device.h"

#include <torch/version.h>

#include <algorithm>
#include <thread>

#if FSDPP_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#endif

namespace bench {

#if FSDPP_CUDA
struct StreamTimer::Events {
  cudaEvent_t start = nullptr, stop = nullptr;
};

namespace {

void describe_gpu(Row& row, c10::Device device) {
  cudaDeviceProp properties{};
  int driver = 0, runtime = 0;
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  row["gpu"] = std::string(properties.name);
  row["cuda_driver"] = driver;
  row["cuda_runtime"] = runtime;
}

}  // namespace

AllocatorStats allocator_stats(c10::Device device) {
  if (!device.is_cuda()) return {};
  at::globalContext().lazyInitDevice(c10::kCUDA);  // the allocator knows no device before
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return {.allocated = stats.allocated_bytes[kAll].current,
          .peak = stats.allocated_bytes[kAll].peak,
          .reserved_peak = stats.reserved_bytes[kAll].peak,
          .requested = stats.requested_bytes[kAll].current,
          .requested_peak = stats.requested_bytes[kAll].peak,
          .device_allocs = stats.num_device_alloc};
}

void reset_peak(c10::Device device) {
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(c10::kCUDA);
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

void release_cached(c10::Device device) {
  if (!device.is_cuda()) return;
  at::globalContext().lazyInitDevice(c10::kCUDA);
  c10::cuda::CUDACachingAllocator::emptyCache();
}

void synchronize(c10::Device device) {
  if (device.is_cuda()) C10_CUDA_CHECK(cudaDeviceSynchronize());
}

StreamTimer::StreamTimer(c10::Device device) {
  if (!device.is_cuda()) return;
  const c10::cuda::CUDAGuard guard(device);
  events_ = std::make_unique<Events>();
  C10_CUDA_CHECK(cudaEventCreate(&events_->start));
  C10_CUDA_CHECK(cudaEventCreate(&events_->stop));
}

StreamTimer::~StreamTimer() {
  if (!events_) return;
  (void)cudaEventDestroy(events_->start);
  (void)cudaEventDestroy(events_->stop);
}

void StreamTimer::start(fsdpp::cuda::StreamView stream) {
  if (events_)
    C10_CUDA_CHECK(cudaEventRecord(events_->start, stream.handle()));
  else
    start_ = std::chrono::steady_clock::now();
}

void StreamTimer::stop(fsdpp::cuda::StreamView stream) {
  if (events_)
    C10_CUDA_CHECK(cudaEventRecord(events_->stop, stream.handle()));
  else
    stop_ = std::chrono::steady_clock::now();
}

double StreamTimer::milliseconds() const {
  if (!events_) return bench::milliseconds(stop_ - start_);
  float result = 0;
  C10_CUDA_CHECK(cudaEventSynchronize(events_->stop));
  C10_CUDA_CHECK(cudaEventElapsedTime(&result, events_->start, events_->stop));
  return result;
}
#else
struct StreamTimer::Events {};

namespace {
void describe_gpu(Row&, c10::Device) {}
}  // namespace

AllocatorStats allocator_stats(c10::Device) { return {}; }
void reset_peak(c10::Device) {}
void release_cached(c10::Device) {}
void synchronize(c10::Device) {}
StreamTimer::StreamTimer(c10::Device) {}
StreamTimer::~StreamTimer() = default;
void StreamTimer::start(fsdpp::cuda::StreamView) { start_ = std::chrono::steady_clock::now(); }
void StreamTimer::stop(fsdpp::cuda::StreamView) { stop_ = std::chrono::steady_clock::now(); }
double StreamTimer::milliseconds() const { return bench::milliseconds(stop_ - start_); }
#endif

double milliseconds_of(c10::Device device, double least, const std::function<void()>& call) {
  const auto stream = fsdpp::cuda::current_stream(device);
  StreamTimer timer(device);
  auto time = [&](int calls) {
    timer.start(stream);
    for (int i = 0; i < calls; ++i) call();
    timer.stop(stream);
    return timer.milliseconds() / calls;
  };
  time(2);
  const double guess = std::max(time(3), 1e-4);
  return time(std::clamp(static_cast<int>(least / guess), 3, 10000));
}

Row machine(c10::Device device) {
  Row row{{"cpu_threads", std::thread::hardware_concurrency()}, {"torch", TORCH_VERSION}, {"compiler", __VERSION__}};
  if (device.is_cuda()) describe_gpu(row, device);
  return row;
}

}  // namespace bench

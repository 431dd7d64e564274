#include "fsdpp/cuda/stream.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <thread>
#include <cstring>
#include <vector>

#include "cuda/capture.h"
#include "cuda/check.h"
#include "cuda/spin.h"

namespace fsdpp::cuda {
namespace {

c10::cuda::CUDAStream to_c10(StreamView stream) {
  if (stream.handle() == nullptr) return c10::cuda::getDefaultCUDAStream(stream.device_index());
  return c10::cuda::getStreamFromExternal(stream.handle(), stream.device_index());
}

// A wait takes the event's state at the time of the call, so one event for each thread and device serves all joins.
Event& join_event(c10::DeviceIndex device) {
  thread_local std::vector<Event> events;
  const auto index = static_cast<size_t>(device);
  if (events.size() <= index) events.resize(index + 1);
  return events[index];
}

}  // namespace

void StreamView::wait(const Event& event) const {
  if (!event.recorded_ || event.handle_ == nullptr) return;
  if (!is_cuda()) return event.synchronize();
  const bool joins = event.capture_ != 0 && event.capture_ == running_capture();
  if (!joins && event.capture_ != capture_of(*this)) return;
  FSDPP_CUDA_CHECK(cudaStreamWaitEvent(handle_, event.handle_, 0));
}

void StreamView::wait(StreamView other) const {
  if (*this == other || !other.is_cuda()) return;
  if (!is_cuda()) return other.synchronize();
  if (const auto capture = capture_of(*this); capture != 0 && capture_of(other) == 0) return;
  Event& event = join_event(other.device_);
  event.record(other);
  FSDPP_CUDA_CHECK(cudaStreamWaitEvent(handle_, event.handle_, 0));
}

bool StreamView::is_capturing() const {
  if (!is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FSDPP_CUDA_CHECK(cudaStreamIsCapturing(handle_, &status));
  return status != cudaStreamCaptureStatusNone;
}

void StreamView::synchronize() const {
  if (is_cuda()) FSDPP_CUDA_CHECK(cudaStreamSynchronize(handle_));
}

void StreamView::copy(void* dst, const void* src, int64_t bytes) const {
  if (!is_cuda()) return static_cast<void>(std::memcpy(dst, src, static_cast<size_t>(bytes)));
  FSDPP_CUDA_CHECK(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyDefault, handle_));
}

void StreamView::sleep(double milliseconds) const {
  if (!is_cuda()) return std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
  c10::cuda::CUDAGuard guard(device_);
  check(static_cast<cudaError_t>(launch_spin(static_cast<unsigned long long>(milliseconds * 1e6), handle_)),
        "spin kernel");
}

StreamView current_stream(c10::Device device) {
  if (!device.is_cuda()) return {};
  auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  return {stream.stream(), stream.device_index()};
}

StreamGuard::StreamGuard(StreamView stream) : stream_(stream) {
  if (!stream_.is_cuda()) return;
  previous_id_ = c10::cuda::getCurrentCUDAStream(stream_.device_index()).id();
  c10::cuda::setCurrentCUDAStream(to_c10(stream_));
}

StreamGuard::~StreamGuard() {
  if (!stream_.is_cuda()) return;
  try {
    c10::Stream previous(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, stream_.device_index()), previous_id_);
    c10::cuda::setCurrentCUDAStream(c10::cuda::CUDAStream(previous));
  } catch (...) {
  }
}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(device_, other.device_);
  std::swap(recorded_, other.recorded_);
  std::swap(capture_, other.capture_);
  return *this;
}

Event::~Event() {
  if (handle_ != nullptr) ignore(cudaEventDestroy(handle_));
}

void Event::record(StreamView stream) {
  if (!stream.is_cuda()) {
    recorded_ = true;
    return;
  }
  if (handle_ == nullptr || device_ != stream.device_index()) {
    if (handle_ != nullptr) ignore(cudaEventDestroy(std::exchange(handle_, nullptr)));
    c10::cuda::CUDAGuard guard(stream.device_index());
    FSDPP_CUDA_CHECK(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming));
    device_ = stream.device_index();
  }
  FSDPP_CUDA_CHECK(cudaEventRecord(handle_, stream.handle()));
  capture_ = capture_of(stream);
  recorded_ = true;
}

bool Event::query() const {
  if (!recorded_ || handle_ == nullptr || capture_ != 0) return true;
  const cudaError_t status = cudaEventQuery(handle_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void Event::synchronize() const {
  if (recorded_ && handle_ != nullptr && capture_ == 0) FSDPP_CUDA_CHECK(cudaEventSynchronize(handle_));
}

Stream::Stream(c10::Device device, Priority priority) {
  if (!device.is_cuda()) return;
  FSDPP_ENFORCE(available(), CudaError,
                "cuda::Stream: no CUDA device is present. Try: nvidia-smi -L, or the CPU device.");
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  c10::cuda::CUDAGuard guard(index);
  int least = 0;
  int greatest = 0;
  FSDPP_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t handle = nullptr;
  FSDPP_CUDA_CHECK(
      cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, priority == Priority::High ? greatest : least));
  view_ = StreamView(handle, index);
}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(view_, other.view_);
  return *this;
}

Stream::~Stream() {
  if (view_.is_cuda()) ignore(cudaStreamDestroy(view_.handle()));
}

bool available() { return c10::cuda::device_count() > 0; }

}  // namespace fsdpp::cuda

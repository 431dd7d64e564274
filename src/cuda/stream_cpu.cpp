// The build without CUDA: views, guards and events of the CPU do nothing, anything else is an error.
#include <chrono>
#include <cstring>
#include <thread>

#include "base/enforce.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::cuda {
namespace {

[[noreturn]] void no_cuda(const char* what) {
  fail<CudaError>(
      "{}: expected the CPU device, got a CUDA one, and this fsdpp was built without CUDA. "
      "Try: configure with -DFSDPP_WITH_CUDA=ON.",
      what);
}
void expect_cpu(StreamView stream, const char* what) {
  if (stream.is_cuda()) no_cuda(what);
}

}  // namespace

void StreamView::wait(const Event&) const { expect_cpu(*this, "StreamView::wait"); }
void StreamView::wait(StreamView other) const {
  expect_cpu(*this, "StreamView::wait");
  expect_cpu(other, "StreamView::wait");
}
bool StreamView::is_capturing() const {
  expect_cpu(*this, "StreamView::is_capturing");
  return false;
}
void StreamView::synchronize() const { expect_cpu(*this, "StreamView::synchronize"); }
void StreamView::copy(void* dst, const void* src, int64_t bytes) const {
  expect_cpu(*this, "StreamView::copy");
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}
void StreamView::sleep(double milliseconds) const {
  expect_cpu(*this, "StreamView::sleep");
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
}

StreamView current_stream(c10::Device device) {
  if (device.is_cuda()) no_cuda("current_stream");
  return {};
}

StreamGuard::StreamGuard(StreamView stream) : stream_(stream) { expect_cpu(stream, "StreamGuard"); }
StreamGuard::~StreamGuard() = default;

Event& Event::operator=(Event&& other) noexcept {
  recorded_ = std::exchange(other.recorded_, false);
  return *this;
}
Event::~Event() = default;
void Event::record(StreamView stream) {
  expect_cpu(stream, "Event::record");
  recorded_ = true;
}
bool Event::query() const { return true; }
void Event::synchronize() const {}

Stream::Stream(c10::Device device, Priority) {
  if (device.is_cuda()) no_cuda("Stream");
}
Stream& Stream::operator=(Stream&& other) noexcept {
  view_ = std::exchange(other.view_, StreamView{});
  return *this;
}
Stream::~Stream() = default;

bool available() { return false; }

}  // namespace fsdpp::cuda

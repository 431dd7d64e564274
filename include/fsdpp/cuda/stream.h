#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <utility>

#include "fsdpp/base/export.h"

struct CUstream_st;
struct CUevent_st;

/// Owned CUDA streams and events, and views of streams that somebody else owns. For a CPU device each of them exists
/// and does nothing: CPU work is done when the call that issues it returns, or is waited for through a `Ticket`.
namespace fsdpp::cuda {

class Event;

/// A stream that somebody else owns: a CUDA stream, or the CPU (where every wait is satisfied at once; waiting there
/// for CUDA work blocks the host). Methods throw CudaError when the runtime reports a failure.
class FSDPP_API StreamView {
 public:
  /// The CPU.
  StreamView() = default;
  StreamView(CUstream_st* handle, c10::DeviceIndex device) : handle_(handle), device_(device) {}

  [[nodiscard]] bool is_cuda() const noexcept { return device_ >= 0; }
  /// The CUDA handle (nullptr is CUDA's default stream; only meaningful if is_cuda()).
  [[nodiscard]] CUstream_st* handle() const noexcept { return handle_; }
  [[nodiscard]] c10::DeviceIndex device_index() const noexcept { return device_; }
  [[nodiscard]] bool operator==(const StreamView&) const = default;

  /// Work issued to this stream later starts after `event`. Does not block the host.
  void wait(const Event& event) const;
  /// Work issued to this stream later starts after what `other` holds now. Does not block the host. No-op if equal.
  void wait(StreamView other) const;
  /// True while a CUDA graph is being captured from this stream.
  [[nodiscard]] bool is_capturing() const;
  /// Blocks the host until the stream has run dry.
  void synchronize() const;
  /// Queues a copy of `bytes` bytes between places on this device, or between it and pinned host memory (CPU: copies at once).
  void copy(void* dst, const void* src, int64_t bytes) const;
  /// Test aid: queues a kernel that spins for `milliseconds` (on the CPU: sleeps the calling thread).
  void sleep(double milliseconds) const;

 private:
  CUstream_st* handle_ = nullptr;
  c10::DeviceIndex device_ = -1;
};

/// LibTorch's current stream of `device`.
[[nodiscard]] FSDPP_API StreamView current_stream(c10::Device device);

/// Makes `stream` LibTorch's current stream of its device for the guard's life, then restores the one before. The
/// current device stays as it is. No-op for the CPU.
class FSDPP_API StreamGuard {
 public:
  explicit StreamGuard(StreamView stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  StreamView stream_;
  int64_t previous_id_ = 0;  // c10's StreamId, so that the very same c10 stream comes back
};

/// A CUDA event without timing, or nothing on the CPU. Remembers its device. An event that was never recorded counts as
/// done. So does one across the border of a Graph::capture(): the device is idle when a capture begins, and a replay is
/// ordered by the stream that it runs on.
class FSDPP_API Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        device_(other.device_),
        recorded_(std::exchange(other.recorded_, false)),
        capture_(std::exchange(other.capture_, 0)) {}
  Event& operator=(Event&& other) noexcept;
  ~Event();

  /// Marks the point that `stream` has reached. Creates the CUDA event at first use; records anew at later ones.
  void record(StreamView stream);
  /// True when that point was passed. Never blocks.
  [[nodiscard]] bool query() const;
  /// Blocks the host until that point was passed.
  void synchronize() const;
  [[nodiscard]] bool recorded() const noexcept { return recorded_; }

 private:
  friend class StreamView;
  CUevent_st* handle_ = nullptr;
  c10::DeviceIndex device_ = -1;
  bool recorded_ = false;
  uint64_t capture_ = 0;  // of which Graph::capture() it marks a point; 0: of none
};

/// A stream of our own, non-blocking, made outside c10's pool (pool streams repeat after 32). Move-only.
class FSDPP_API Stream {
 public:
  enum class Priority { Normal, High };
  /// The CPU.
  Stream() = default;
  /// A new stream on `device`; for a CPU device the CPU view.
  explicit Stream(c10::Device device, Priority priority = Priority::High);
  Stream(Stream&& other) noexcept : view_(std::exchange(other.view_, StreamView{})) {}
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  [[nodiscard]] StreamView view() const noexcept { return view_; }
  operator StreamView() const noexcept { return view_; }  // NOLINT: a stream is usable wherever a view is

 private:
  StreamView view_;
};

/// True when the library was built with CUDA and a device is present.
[[nodiscard]] FSDPP_API bool available();

}  // namespace fsdpp::cuda

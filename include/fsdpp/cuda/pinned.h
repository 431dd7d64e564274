#pragma once
#include <cstddef>
#include <span>
#include <utility>

#include "fsdpp/base/export.h"

namespace fsdpp::cuda {

/// Owned host memory for copies between host and device. Page-locked where available() is true, so that copies on a
/// stream run beside computation; plain memory elsewhere. 64-byte aligned, not initialised. Move-only.
///
/// The owner keeps it until every copy that uses it was waited for: giving page-locked memory back does not wait.
/// Making one may synchronise the device: reserve at start, not inside a step.
class FSDPP_API PinnedBuffer {
 public:
  PinnedBuffer() = default;
  /// Throws CudaError (page-locked) or std::bad_alloc (plain) when the memory is not there. 0 bytes: empty.
  explicit PinnedBuffer(size_t bytes);
  PinnedBuffer(PinnedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), pinned_(other.pinned_) {}
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  ~PinnedBuffer();

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] bool pinned() const noexcept { return pinned_; }
  template <class T>
  [[nodiscard]] std::span<T> as() const noexcept {
    return {static_cast<T*>(data_), bytes_ / sizeof(T)};
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool pinned_ = false;
};

}  // namespace fsdpp::cuda

#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fsdpp::profiler {

/// Memory for device records: zeroed pages, kept until they are decoded. A few are ready before they are asked for, since
/// CUPTI asks on the thread that launches. Beyond `limit_bytes` nothing more is given, and that is counted.
class BufferPool {
 public:
  static constexpr size_t kBufferBytes = size_t{4} << 20;

  explicit BufferPool(int64_t limit_bytes) : limit_(static_cast<size_t>(limit_bytes) / kBufferBytes) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Fills up to `count` buffers in advance.
  void prepare(size_t count);
  /// nullptr when the limit is reached.
  [[nodiscard]] uint8_t* take() noexcept;
  /// `valid` bytes of it were written.
  void complete(uint8_t* buffer, size_t valid) noexcept;

  struct Full {
    uint8_t* data;
    size_t valid;
  };
  /// Hands over what is complete; give each back by release().
  [[nodiscard]] std::vector<Full> completed();
  void release(uint8_t* buffer) noexcept;

  /// How often take() refused since the last call.
  [[nodiscard]] int64_t refused() noexcept;

 private:
  std::mutex mutex_;
  const size_t limit_;
  size_t mapped_ = 0;  // buffers that exist
  int64_t refused_ = 0;
  std::vector<uint8_t*> ready_;
  std::vector<Full> full_;
};

}  // namespace fsdpp::profiler

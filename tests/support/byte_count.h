#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace fsdpp::test {

/// Bytes taken from and given back to the allocator of `device` by this thread since construction.
class ByteCount {
 public:
  explicit ByteCount(c10::Device device) : counter_(std::make_shared<Counter>(device)), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  [[nodiscard]] int64_t now() const { return counter_->now; }
  /// The most since the last call.
  [[nodiscard]] int64_t take_peak() { return std::exchange(counter_->peak, counter_->now); }
  /// Allocations since the last call.
  [[nodiscard]] int64_t take_allocations() { return std::exchange(counter_->allocations, 0); }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    explicit Counter(c10::Device d) : device(d) {}
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device on) override {
      if (on.type() != device.type()) return;
      now += bytes;
      peak = std::max(peak, now);
      allocations += bytes >= kLarge ? 1 : 0;
    }
    bool memoryProfilingEnabled() const override { return true; }
    static constexpr int64_t kLarge = 1 << 16;  // beyond activations
    c10::Device device;
    int64_t now = 0, peak = 0, allocations = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace fsdpp::test

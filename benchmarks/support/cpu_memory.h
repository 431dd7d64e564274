#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace bench {

/// Bytes that this thread, and backward on the CPU, which runs on it, take from LibTorch's CPU allocator and give back while this lives.
class CpuMemory {
 public:
  CpuMemory() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  [[nodiscard]] int64_t now() const { return counter_->now; }
  [[nodiscard]] int64_t peak() const { return counter_->peak; }  ///< since reset_peak
  void reset_peak() { counter_->peak = counter_->now; }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
      if (!device.is_cpu()) return;
      now += bytes;
      peak = std::max(peak, now);
    }
    [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
    int64_t now = 0, peak = 0;
  };
  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};

}  // namespace bench

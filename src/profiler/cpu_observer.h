#pragma once
#include <memory>

namespace fsdpp::profiler {

/// While it lives, LibTorch's operators of all threads, and if asked for the allocations of this thread and of those that
/// take over its state, are written into the host log. Make and destroy it on one thread.
class CpuObserver {
 public:
  CpuObserver(bool inputs, bool memory);
  ~CpuObserver();
  CpuObserver(const CpuObserver&) = delete;
  CpuObserver& operator=(const CpuObserver&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp::profiler

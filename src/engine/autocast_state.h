#pragma once
#include <c10/core/ScalarType.h>

#include <array>

namespace fsdpp::engine {

/// Autocast of this thread at one moment, for CPU and CUDA.
class AutocastState {
 public:
  [[nodiscard]] static AutocastState now();
  void restore() const;

 private:
  struct OfDevice {
    bool enabled;
    c10::ScalarType dtype;
  };
  std::array<OfDevice, 2> devices_;
  bool caches_ = false;
};

/// Another state while alive, as a scope of autocast of its own.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState before_;
};

}  // namespace fsdpp::engine

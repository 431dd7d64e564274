#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {

/// The first failure of a communicator: set once, thrown on every later call. Thread-safe.
class Failure {
 public:
  /// True if this call was the first.
  bool set(CommErrc code, const std::string& text) noexcept;
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Throws CommError if set.
  void check() const {
    if (failed()) [[unlikely]]
      rethrow();
  }
  [[nodiscard]] CommErrc code() const noexcept { return code_; }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  [[noreturn]] void rethrow() const;

  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  CommErrc code_ = CommErrc::Backend;  // written before failed_, constant afterwards
  std::string text_;
};

}  // namespace fsdpp::comm

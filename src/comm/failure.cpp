#include "comm/failure.h"

#include "base/enforce.h"

namespace fsdpp::comm {

bool Failure::set(CommErrc code, const std::string& text) noexcept {
  std::lock_guard lock(mutex_);
  if (failed()) return false;
  code_ = code;
  try {
    text_ = text;
  } catch (...) {  // out of memory: the code alone has to do
  }
  failed_.store(true, std::memory_order_release);
  return true;
}

void Failure::rethrow() const { fail_comm(code_, "{}", text_); }

}  // namespace fsdpp::comm

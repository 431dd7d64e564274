#pragma once
#include <fmt/format.h>

#include <string>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp {

/// "[rank 3/8] " or "[rank 3/8, iteration 12] " for the rank of this thread, "" before a world exists. See set_rank and set_iteration in base/log.h.
FSDPP_API std::string rank_prefix();

/// Throws E with the rank prefix and a formatted message.
template <class E, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw E(rank_prefix() + fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
[[noreturn]] void fail_comm(CommErrc code, fmt::format_string<Args...> format, Args&&... args) {
  throw CommError(code, rank_prefix() + fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fsdpp

/// FSDPP_ENFORCE(condition, ErrorType, "format", args...): throws ErrorType when the condition is false.
#define FSDPP_ENFORCE(condition, ErrorType, ...)     \
  do {                                               \
    if (!(condition)) [[unlikely]]                   \
      ::fsdpp::fail<ErrorType>(__VA_ARGS__);         \
  } while (false)

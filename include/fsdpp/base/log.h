#pragma once
#include <string_view>

#include "fsdpp/base/export.h"

/// Log lines to standard error, prefixed by level and rank. Level from `FSDPP_LOG` = trace|debug|info|warn|error|off
/// (default warn). Safe from any thread; never throws.
namespace fsdpp::log {

FSDPP_API void debug(std::string_view message) noexcept;
FSDPP_API void info(std::string_view message) noexcept;
FSDPP_API void warn(std::string_view message) noexcept;
FSDPP_API void error(std::string_view message) noexcept;

/// Sets the rank that log lines and error messages of this process carry. `for_this_thread` limits it to the calling
/// thread (ranks as threads).
FSDPP_API void set_rank(int rank, int world_size, bool for_this_thread = false) noexcept;

}  // namespace fsdpp::log

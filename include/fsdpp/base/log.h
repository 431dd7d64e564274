#pragma once
#include <cstdint>
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

/// Sets the iteration (forwards of a root unit, from 0) that they carry too, for this process, or for the calling thread if it is a
/// rank of its own. The engine calls it.
FSDPP_API void set_iteration(int64_t iteration) noexcept;

}  // namespace fsdpp::log

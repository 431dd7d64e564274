#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "fsdpp/base/export.h"

/// The only place that reads environment variables.
namespace fsdpp::env {

/// The value, or nothing when unset or empty.
FSDPP_API std::optional<std::string> get(const char* name);

/// The value as a whole number in [low, high], or nothing when unset. Throws ConfigError naming variable and value.
FSDPP_API std::optional<int64_t> get_int(const char* name, int64_t low, int64_t high);

/// 1/true/yes/on or 0/false/no/off, or `fallback` when unset. Throws ConfigError naming variable and value.
FSDPP_API bool get_flag(const char* name, bool fallback);

/// Sets a variable for this process and its children unless it is set already. Call before threads exist.
FSDPP_API void set_default(const char* name, const std::string& value);

}  // namespace fsdpp::env

#include "base/env.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/enforce.h"

namespace fsdpp::env {

std::optional<std::string> get(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int64_t> get_int(const char* name, int64_t low, int64_t high) {
  auto text = get(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc{} || end != text->data() + text->size() || value < low || value > high)
    fail<ConfigError>("environment variable {}: expected a whole number from {} to {}, got '{}'", name, low, high, *text);
  return value;
}

bool get_flag(const char* name, bool fallback) {
  auto text = get(name);
  if (!text) return fallback;
  for (std::string_view yes : {"1", "true", "True", "yes", "on"})
    if (*text == yes) return true;
  for (std::string_view no : {"0", "false", "False", "no", "off"})
    if (*text == no) return false;
  fail<ConfigError>("environment variable {}: expected 1/true/yes/on or 0/false/no/off, got '{}'", name, *text);
}

void set_default(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 0); }

}  // namespace fsdpp::env

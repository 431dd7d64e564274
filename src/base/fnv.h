#pragma once
#include <cstdint>
#include <string_view>

namespace fsdpp {

/// FNV-1a, 64 bits: equal on every machine, unlike std::hash.
constexpr uint64_t fnv1a_step(uint64_t hash, uint64_t value) noexcept { return (hash ^ value) * 1099511628211ULL; }
constexpr uint64_t fnv1a(std::string_view text) noexcept {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = fnv1a_step(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace fsdpp

#pragma once
#include <cstdint>

namespace fsdpp::shard::test {

/// Bytes that operator new has given to this thread so far. Replaces it in the program that links counted_new.cpp.
[[nodiscard]] int64_t allocated_bytes() noexcept;

}  // namespace fsdpp::shard::test

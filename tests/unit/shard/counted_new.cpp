// In a file of its own: inlined beside a `new`, the compiler takes free() for the wrong partner.
#include "unit/shard/counted_new.h"

#include <cstdlib>
#include <new>

namespace fsdpp::shard::test {
namespace {

thread_local int64_t bytes_of_thread = 0;

void* counted(size_t bytes) {
  bytes_of_thread += static_cast<int64_t>(bytes);
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace

int64_t allocated_bytes() noexcept { return bytes_of_thread; }

}  // namespace fsdpp::shard::test

void* operator new(size_t bytes) { return fsdpp::shard::test::counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

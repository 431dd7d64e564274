#include "profiler/buffer_pool.h"

#include <sys/mman.h>

#include <utility>

namespace fsdpp::profiler {
namespace {

uint8_t* map_buffer(int flags) noexcept {
  void* memory = mmap(nullptr, BufferPool::kBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
}

}  // namespace

BufferPool::~BufferPool() {
  for (uint8_t* buffer : ready_) munmap(buffer, kBufferBytes);
  for (const Full& full : full_) munmap(full.data, kBufferBytes);
}

void BufferPool::prepare(size_t count) {
  std::lock_guard lock(mutex_);
  while (ready_.size() < count && mapped_ < limit_) {
    uint8_t* buffer = map_buffer(MAP_POPULATE);
    if (buffer == nullptr) return;
    ready_.push_back(buffer);
    ++mapped_;
  }
}

uint8_t* BufferPool::take() noexcept {
  std::lock_guard lock(mutex_);
  if (!ready_.empty()) {
    uint8_t* buffer = ready_.back();
    ready_.pop_back();
    return buffer;
  }
  uint8_t* buffer = mapped_ < limit_ ? map_buffer(0) : nullptr;
  buffer ? ++mapped_ : size_t(++refused_);
  return buffer;
}

void BufferPool::complete(uint8_t* buffer, size_t valid) noexcept {
  if (buffer == nullptr) return;
  try {
    std::lock_guard lock(mutex_);
    full_.push_back({buffer, valid});
  } catch (...) {  // no memory for the list: lost, and said so
    release(buffer);
    std::lock_guard lock(mutex_);
    ++refused_;
  }
}

std::vector<BufferPool::Full> BufferPool::completed() {
  std::lock_guard lock(mutex_);
  return std::exchange(full_, {});
}

void BufferPool::release(uint8_t* buffer) noexcept {
  munmap(buffer, kBufferBytes);
  std::lock_guard lock(mutex_);
  --mapped_;
}

int64_t BufferPool::refused() noexcept {
  std::lock_guard lock(mutex_);
  return std::exchange(refused_, 0);
}

}  // namespace fsdpp::profiler

#include "engine/slot_pool.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace fsdpp::engine {

SlotPool::~SlotPool() {
  try {
    for (auto& slot : slots_) slot->free_event.synchronize();
  } catch (...) {  // a lost device can't be waited for
  }
}

SlotPool::Slot* SlotPool::acquire(int64_t bytes, cuda::StreamView user) {
  if (bytes == 0) return nullptr;
  bytes = rounded(bytes);
  auto* slot = find_free(bytes, user);
  if (!slot)
    slot = allocate(bytes, user);
  else if (!(slot->freed_on == user))
    user.wait(slot->free_event);
  slot->in_use = true;
  return slot;
}

SlotPool::Slot* SlotPool::find_free(int64_t bytes, cuda::StreamView user) {
  Slot* oldest = nullptr;
  int alike = 0;
  for (auto& slot : slots_) {
    if (slot->bytes != bytes) continue;
    ++alike;
    if (slot->in_use) continue;
    if (slot->freed_on == user) return slot.get();
    if (!oldest || slot->freed_at < oldest->freed_at) oldest = slot.get();
  }
  const auto planned = reserved_.find(bytes);
  const int wanted = planned == reserved_.end() ? wanted_ : planned->second;
  return oldest && (alike >= wanted || freed_long_ago(*oldest)) ? oldest : nullptr;
}

comm::Allocation SlotPool::take_memory(int64_t bytes) {
  if (comm_) return comm_->allocate(bytes, {.label = label_});
  return {c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes)), bytes};
}

void SlotPool::reserve(int64_t bytes, int count) {
  if (bytes == 0) return;
  bytes = rounded(bytes);
  const auto current = cuda::current_stream(device_);
  auto alike = std::count_if(slots_.begin(), slots_.end(), [&](auto& slot) { return slot->bytes == bytes; });
  for (; alike < count; ++alike) release(allocate(bytes, current), current);
  auto& planned = reserved_[bytes];
  planned = std::max(planned, count);
}

SlotPool::Slot* SlotPool::allocate(int64_t bytes, cuda::StreamView user) {
  auto slot = std::make_unique<Slot>();
  auto memory = take_memory(bytes);
  slot->memory = std::move(memory.data);
  slot->bytes = bytes;
  slot->registered = memory.registered;
  user.wait(cuda::current_stream(device_));  // the allocator hands out memory in the order of the current stream
  slots_.push_back(std::move(slot));
  return slots_.back().get();
}

void SlotPool::release(Slot* slot, cuda::StreamView last_user) {
  if (!slot) return;
  slot->free_event.record(last_user);
  slot->freed_on = last_user;
  slot->freed_at = ++releases_;
  slot->in_use = false;
}

int64_t SlotPool::reserved_bytes() const noexcept {
  int64_t sum = 0;
  for (auto& slot : slots_) sum += slot->bytes;
  return sum;
}

int64_t SlotPool::registered_bytes() const noexcept {
  int64_t sum = 0;
  for (auto& slot : slots_) sum += slot->registered ? slot->bytes : 0;
  return sum;
}

}  // namespace fsdpp::engine

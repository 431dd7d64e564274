#include "engine/slot_pool.h"

#include <c10/core/Allocator.h>

#include <algorithm>

namespace fsdpp::engine {
namespace {

// A slot may be this much larger than what is asked for, so that units of nearly equal size share slots.
bool fits(int64_t slot_bytes, int64_t bytes) { return slot_bytes >= bytes && slot_bytes <= bytes + bytes / 4; }

}  // namespace

SlotPool::~SlotPool() {
  try {
    for (auto& slot : slots_) slot->free_event.synchronize();
  } catch (...) {  // a lost device can't be waited for
  }
}

SlotPool::Slot* SlotPool::acquire(int64_t bytes, cuda::StreamView user) {
  if (bytes == 0) return nullptr;
  Slot* best = nullptr;
  for (auto& slot : slots_)
    if (!slot->in_use && fits(slot->bytes, bytes) && (!best || slot->bytes < best->bytes)) best = slot.get();
  if (best) {
    if (!(best->freed_on == user)) user.wait(best->free_event);
  } else {
    slots_.push_back(std::make_unique<Slot>());
    best = slots_.back().get();
    best->memory = c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes));
    best->bytes = bytes;
    user.wait(cuda::current_stream(device_));  // the allocator hands out memory in the order of the current stream
  }
  best->in_use = true;
  return best;
}

void SlotPool::release(Slot* slot, cuda::StreamView last_user) {
  if (!slot) return;
  slot->free_event.record(last_user);
  slot->freed_on = last_user;
  slot->in_use = false;
}

int64_t SlotPool::reserved_bytes() const noexcept {
  int64_t sum = 0;
  for (auto& slot : slots_) sum += slot->bytes;
  return sum;
}

int64_t SlotPool::in_use_bytes() const noexcept {
  int64_t sum = 0;
  for (auto& slot : slots_) sum += slot->in_use ? slot->bytes : 0;
  return sum;
}

void SlotPool::trim() {
  std::erase_if(slots_, [](auto& slot) {
    if (slot->in_use) return false;
    slot->free_event.synchronize();
    return true;
  });
}

}  // namespace fsdpp::engine

#pragma once
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/cuda/stream.h"

namespace fsdpp::engine {

/// Device memory that units take in turn for gathered and gradient buffers. Memory once reserved stays reserved, so a steady
/// state allocates nothing and addresses repeat from step to step. Not thread-safe.
class SlotPool {
 public:
  explicit SlotPool(c10::Device device) : device_(device) {}
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  /// One piece of memory and the point at which its last user is done with it.
  struct Slot {
    c10::DataPtr memory;
    int64_t bytes = 0;
    cuda::Event free_event;
    cuda::StreamView freed_on;
    uint64_t freed_at = 0;  ///< order of release
    bool in_use = false;
    [[nodiscard]] void* data() const noexcept { return memory.get(); }
  };

  /// `bytes` bytes, 256-byte aligned, for work on `user`, which waits (not the host) for the previous user. Slots stay
  /// at their address. While fewer than slots() of this size exist, a new one is preferred to waiting for a slot that
  /// another stream gave back, unless that was long ago: kLongAgo others were given back since, or settle() was called. nullptr
  /// for 0 bytes.
  static constexpr int kSlots = 2;  ///< slots() by default
  static constexpr uint64_t kLongAgo = 2;
  [[nodiscard]] Slot* acquire(int64_t bytes, cuda::StreamView user);
  /// Gives a slot back; what `last_user` holds now is the last that touches it. nullptr is allowed.
  void release(Slot* slot, cuda::StreamView last_user);

  /// The streams that take slots wait for everything given back so far.
  void settle() noexcept { settled_ = releases_; }

  void set_slots(int count) noexcept { wanted_ = count; }
  [[nodiscard]] int64_t reserved_bytes() const noexcept;

 private:
  c10::Device device_;
  int wanted_ = kSlots;
  std::vector<std::unique_ptr<Slot>> slots_;
  uint64_t releases_ = 0, settled_ = 0;
  [[nodiscard]] bool freed_long_ago(const Slot& slot) const noexcept {
    return slot.freed_at <= settled_ || releases_ - slot.freed_at >= kLongAgo;
  }
  [[nodiscard]] Slot* find_free(int64_t bytes, cuda::StreamView user);
  [[nodiscard]] Slot* allocate(int64_t bytes, cuda::StreamView user);
};

}  // namespace fsdpp::engine

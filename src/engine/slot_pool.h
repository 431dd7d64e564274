#pragma once
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/comm/communicator.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::engine {

/// Device memory that units take in turn for gathered and gradient buffers. Memory once reserved stays reserved, so a steady
/// state allocates nothing and addresses repeat from step to step. Not thread-safe.
class SlotPool {
 public:
  /// With `comm`, memory comes from Communicator::allocate and is registered there for the pool's life: then every slot that is made is
  /// made by all ranks together.
  explicit SlotPool(c10::Device device, comm::Communicator* comm = nullptr, std::string label = {})
      : device_(device), comm_(comm), label_(std::move(label)) {}
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  /// One piece of memory and the point at which its last user is done with it.
  struct Slot {
    c10::DataPtr memory;
    int64_t bytes = 0;
    bool registered = false;
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

  /// Whether slots are operands of a communicator.
  [[nodiscard]] bool symmetric() const noexcept { return comm_ != nullptr; }
  /// Makes slots of `bytes` bytes until there are `count`, so that ranks whose uses come in different orders have them all. Later acquire()
  /// makes more of this size only while all of them are in use.
  void reserve(int64_t bytes, int count);

  void set_slots(int count) noexcept { wanted_ = count; }
  /// What a slot for so many bytes takes: registered memory comes in multiples of comm::kRegisteredGranule, and all sizes that round to
  /// the same share slots.
  [[nodiscard]] int64_t rounded(int64_t bytes) const noexcept {
    const int64_t granule = comm_ && device_.is_cuda() ? comm::kRegisteredGranule : 1;
    return (bytes + granule - 1) / granule * granule;
  }
  [[nodiscard]] int64_t reserved_bytes() const noexcept;
  /// Of those, what LibTorch's allocator knows nothing of.
  [[nodiscard]] int64_t registered_bytes() const noexcept;

 private:
  c10::Device device_;
  comm::Communicator* comm_;
  std::string label_;
  int wanted_ = kSlots;
  std::map<int64_t, int> reserved_;  ///< slots by size
  std::vector<std::unique_ptr<Slot>> slots_;
  uint64_t releases_ = 0, settled_ = 0;
  [[nodiscard]] bool freed_long_ago(const Slot& slot) const noexcept {
    return slot.freed_at <= settled_ || releases_ - slot.freed_at >= kLongAgo;
  }
  [[nodiscard]] Slot* find_free(int64_t bytes, cuda::StreamView user);
  [[nodiscard]] Slot* allocate(int64_t bytes, cuda::StreamView user);
  [[nodiscard]] comm::Allocation take_memory(int64_t bytes);
};

}  // namespace fsdpp::engine

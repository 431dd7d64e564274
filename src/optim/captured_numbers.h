#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <utility>

#include "fsdpp/cuda/pinned.h"
#include "fsdpp/cuda/stream.h"
#include "kernels/kernels.h"

namespace fsdpp::optim {

/// The numbers of the launches of an optimizer that were captured in a graph: they change from replay to replay (step count, learning rate),
/// so the kernels read them from device memory, and the host writes them before each replay.
class CapturedNumbers {
 public:
  /// Bytes of one launch's numbers, at most.
  static constexpr int64_t kSlotBytes = kernels::kMaxNumbersBytes;

  /// Memory for `launches` of them. REQUIRES: outside a capture: a graph's own memory serves other tensors earlier in the replay.
  [[nodiscard]] static at::Tensor make_memory(c10::Device device, size_t launches);
  explicit CapturedNumbers(at::Tensor memory) : numbers_(std::move(memory)) {}
  /// Waits until the last copies are done.
  ~CapturedNumbers();
  CapturedNumbers(const CapturedNumbers&) = delete;
  CapturedNumbers& operator=(const CapturedNumbers&) = delete;

  /// The next launch's place, in device memory.
  [[nodiscard]] const void* take_slot();
  /// Calls write(slot, host memory) for each slot taken and queues a copy of all on the current stream. Blocks the host only while as many
  /// uploads as there are stages are under way.
  void upload(const std::function<void(size_t slot, void* out)>& write);

 private:
  struct Stage {
    cuda::PinnedBuffer memory;
    cuda::Event copied;
  };
  at::Tensor numbers_;
  size_t taken_ = 0;
  std::array<Stage, 4> stages_;
  size_t turn_ = 0;
};

}  // namespace fsdpp::optim

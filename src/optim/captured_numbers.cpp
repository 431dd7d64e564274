#include "optim/captured_numbers.h"

#include <ATen/ops/empty.h>

#include "base/enforce.h"

namespace fsdpp::optim {

at::Tensor CapturedNumbers::make_memory(c10::Device device, size_t launches) {
  return at::empty({static_cast<int64_t>(launches) * kSlotBytes}, at::TensorOptions(device).dtype(c10::kByte));
}

CapturedNumbers::~CapturedNumbers() {
  try {
    for (const Stage& stage : stages_) stage.copied.synchronize();
  } catch (...) {  // a lost device can't be waited for
  }
}

const void* CapturedNumbers::take_slot() {
  const int64_t offset = static_cast<int64_t>(taken_) * kSlotBytes;
  FSDPP_ENFORCE(offset < numbers_.numel(), UsageError,
                "an optimizer was captured with more than {} launches in one graph. Try: one step() for each replay", taken_);
  ++taken_;
  return static_cast<const char*>(numbers_.const_data_ptr()) + offset;
}

void CapturedNumbers::upload(const std::function<void(size_t slot, void* out)>& write) {
  const size_t bytes = taken_ * kSlotBytes;
  Stage& stage = stages_[turn_++ % stages_.size()];
  stage.copied.synchronize();
  if (stage.memory.bytes() < bytes) stage.memory = cuda::PinnedBuffer(bytes);
  for (size_t slot = 0; slot < taken_; ++slot) write(slot, static_cast<char*>(stage.memory.data()) + slot * kSlotBytes);
  const auto stream = cuda::current_stream(numbers_.device());
  stream.copy(numbers_.mutable_data_ptr(), stage.memory.data(), static_cast<int64_t>(bytes));
  stage.copied.record(stream);
}

}  // namespace fsdpp::optim

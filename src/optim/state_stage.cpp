#include "optim/state_stage.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace fsdpp::optim {

StateStage::StateStage(c10::Device device, int64_t piece_numel)
    : device_(device), piece_numel_(piece_numel), in_(device), out_(device) {}

StateStage::~StateStage() {
  try {
    synchronize();
  } catch (...) {  // a device that failed has no state to wait for
    return;
  }
}

void StateStage::synchronize() const { out_.view().synchronize(); }

void StateStage::begin_step() const { in_.view().wait(out_.view()); }

void StateStage::bring(Slot& slot, const FlatRange& host, FlatRange& piece) {
  in_.view().wait(slot.gone);
  for (size_t k = kFirst; k < kEnd; ++k) {
    const FlatRange::Array& array = host.arrays[k];
    if (array.width == 0) continue;
    at::Tensor& memory = slot.memory[k - kFirst];
    const int64_t bytes = piece_numel_ * array.width;
    if (!memory.defined() || memory.numel() < bytes) {
      cuda::current_stream(device_).wait(slot.gone);  // the allocator may give the old memory away on this stream
      memory = at::empty({bytes}, at::TensorOptions(device_).dtype(c10::kByte));
      in_.view().wait(cuda::current_stream(device_));  // the allocator gives memory for use on this stream
    }
    piece.arrays[k].data = static_cast<char*>(memory.mutable_data_ptr());
    in_.view().copy(piece.arrays[k].data, array.data, host.numel * array.width);
  }
  slot.there.record(in_);
}

void StateStage::take_back(Slot& slot, const FlatRange& host, const FlatRange& piece) {
  out_.view().wait(slot.updated);
  for (size_t k = kFirst; k < kEnd; ++k) {
    const FlatRange::Array& array = host.arrays[k];
    if (array.width != 0) out_.view().copy(array.data, piece.arrays[k].data, host.numel * array.width);
  }
  slot.gone.record(out_);
}

void StateStage::update(const FlatRange& range, const std::function<void(const FlatRange&)>& update) {
  const cuda::StreamView compute = cuda::current_stream(device_);
  for (int64_t begin = 0; begin < range.numel; begin += piece_numel_) {
    Slot& slot = slots_[turn_++ % slots_.size()];
    const FlatRange host = part_of(range, begin, std::min(piece_numel_, range.numel - begin));
    FlatRange piece = host;
    bring(slot, host, piece);
    compute.wait(slot.there);
    update(piece);
    slot.updated.record(compute);
    take_back(slot, host, piece);
  }
}

}  // namespace fsdpp::optim

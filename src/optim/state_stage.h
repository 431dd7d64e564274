#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>

#include "fsdpp/cuda/stream.h"
#include "optim/flat_range.h"

namespace fsdpp::optim {

/// Brings optimizer state from host memory to a device and back, piece by piece: while one piece is updated on the
/// current stream, the next one comes and the one before goes, each on a stream of its own.
class StateStage {
 public:
  /// Arrays [kFirst, kEnd) of a range are state.
  static constexpr size_t kFirst = 2, kEnd = 5;

  StateStage(c10::Device device, int64_t piece_numel);
  /// Waits until the last piece has gone.
  ~StateStage();
  StateStage(const StateStage&) = delete;
  StateStage& operator=(const StateStage&) = delete;

  [[nodiscard]] c10::Device device() const noexcept { return device_; }
  /// What comes from now on comes after all that went before: state may be brought once more.
  void begin_step() const;
  /// Calls update(piece) for pieces of `range`, whose state is in host memory and in each piece on the device. The host
  /// memory is up to date after synchronize(), or for pieces brought after begin_step().
  void update(const FlatRange& range, const std::function<void(const FlatRange&)>& update);
  /// Blocks the host until all state is back.
  void synchronize() const;

 private:
  struct Slot {
    std::array<at::Tensor, kEnd - kFirst> memory;  // bytes
    cuda::Event there, updated, gone;
  };
  void bring(Slot& slot, const FlatRange& host, FlatRange& piece);
  void take_back(Slot& slot, const FlatRange& host, const FlatRange& piece);

  c10::Device device_;
  int64_t piece_numel_;
  cuda::Stream in_, out_;
  std::array<Slot, 2> slots_;
  size_t turn_ = 0;
};

}  // namespace fsdpp::optim

#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "fsdpp/base/export.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::cuda {

/// Work on a CUDA device, captured once and replayed as one launch. Tensors made while it is captured live in memory of the graph's own,
/// which it keeps: their values are those of the last replay. One capture at a time in a process. See fsdpp::StepGraph for training.
class FSDPP_API Graph {
 public:
  /// Throws CudaError for a device that is not CUDA, or a build without it.
  explicit Graph(c10::Device device);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Captures what `work` queues on stream(), which is current while it runs, and on streams that join it before `work` returns.
  /// Nothing is executed. Waits for the device first. If `work` throws, or did what can't be captured (waiting for the device, reading
  /// from it), that exception leaves and the graph stays empty.
  void capture(const std::function<void()>& work);
  /// Queues all of it on the current stream. REQUIRES: capture() succeeded.
  void replay();
  [[nodiscard]] bool captured() const noexcept;
  /// The stream that capture() uses: also for the runs that warm up for it.
  [[nodiscard]] StreamView stream() const noexcept;

  /// What is being captured in this process, or nullptr. Any thread.
  [[nodiscard]] static Graph* capturing() noexcept;
  /// Within capture(): `update` runs on the host before each replay, what it queues on the current stream comes before the replay. For
  /// numbers that change from replay to replay, in memory that was there before the capture: the graph's own serves several tensors in
  /// the course of a replay. Kept as long as the graph.
  void before_replay(std::function<void()> update);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp::cuda

#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/counters.h"

/// Hardware counters for the kernels of a traced window, from the training steps after it.
///
///   StepCounters counting(cupti_counter_device(0), profiler.trace(), how);  // after the window, on all ranks alike
///   while (!counting.done()) { counting.begin_step(); train_step(); counting.end_step(); }
///   options.counters = {counting.take()};                                   // of ReportOptions
namespace fsdpp::profiler {

/// What counts on one device.
class FSDPP_API CounterDevice {
 public:
  virtual ~CounterDevice();
  /// Throws Error where it can't.
  [[nodiscard]] virtual std::unique_ptr<RangeCounters> open(const CounterRequest& request, int max_kernels) = 0;
  /// Keeps the names of launched kernels from here on.
  virtual void watch_launches() = 0;
  /// Stops that. The names in order, or none where nobody can tell.
  [[nodiscard]] virtual std::vector<std::string> launches() = 0;
};
/// Host and UUID of a GPU, equal for two processes on the same one, which can't both count; empty without a driver.
[[nodiscard]] FSDPP_API std::string gpu_identity(int device);
/// By CUPTI. Throws nothing: open() tells what is in the way.
[[nodiscard]] FSDPP_API std::unique_ptr<CounterDevice> cupti_counter_device(int device);

struct CounterOptions {
  /// One after the other; a set that can't be counted is left out and named. The first one is the verdict's and must
  /// work.
  std::vector<std::string> sets{"V1", "V2", "R-bf16", "R-fp32"};
  int world_size = 1;
  /// Collective: true where it is true on every rank. Needed with several ranks, which go through the same steps and
  /// sets.
  std::function<bool(bool)> everywhere = {};
  /// Why this rank must not count ("ranks share a GPU"); empty: it may.
  std::string forbidden = {};
};

/// Range by range, one pass a step: no kernel and no collective is ever replayed, the training just goes on. Kernels
/// run one at a time in counted steps, so these steps' times say nothing about training; the traced ones do.
///
/// Methods are collective where CounterOptions::everywhere is.
class FSDPP_API StepCounters {
 public:
  /// Opens the first set. `traced` must outlive this object and gives the names of kernels if the device can't.
  StepCounters(std::unique_ptr<CounterDevice> device, const Trace& traced, CounterOptions options);
  ~StepCounters();
  /// No further step is needed: all sets were counted, or counting failed on a rank.
  [[nodiscard]] bool done() const noexcept { return done_; }
  void begin_step();
  void end_step();
  /// What was counted, with the rung of the range profiler: usable, or why not. Ends counting.
  [[nodiscard]] Counters take();

 private:
  bool everywhere(bool mine) const { return options_.everywhere ? options_.everywhere(mine) : mine; }
  bool attempt(const std::function<void()>& part);
  void open_set();
  void join_set(std::vector<std::string> launched);
  void give_up_set();
  void close();

  std::unique_ptr<CounterDevice> device_;
  const Trace& traced_;
  CounterOptions options_;
  std::unique_ptr<RangeCounters> ranges_;
  size_t set_ = 0;
  bool done_ = false, counting_ = false;
  std::string failure_;  ///< of the current set, on this rank
  std::string reason_;   ///< why there are no counters at all
  std::vector<std::string> notes_;
  CountersByKernel by_kernel_;
};

/// Adds the metrics of `more` to the same occurrences of the same kernels in `to`, as many as both have; kernels that
/// `to` lacks are left out, unless it is empty. Metrics that are in both keep the value of `to`.
FSDPP_API void merge_counters(CountersByKernel& to, CountersByKernel more);

/// A rank's counters as bytes and back, for gathering them on rank 0. counters_from_bytes throws Error on foreign
/// bytes.
[[nodiscard]] FSDPP_API std::string to_bytes(const Counters& counters);
[[nodiscard]] FSDPP_API Counters counters_from_bytes(std::string_view bytes);

}  // namespace fsdpp::profiler

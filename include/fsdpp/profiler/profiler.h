#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/chrome_trace.h"
#include "fsdpp/profiler/records.h"
#include "fsdpp/profiler/table.h"

/// Profiling inside the training program, next to NCCL, without an external tool.
///
///   profiler::Options options;
///   options.schedule = profiler::Schedule{.wait = 5, .warmup = 2, .active = 3, .repeat = 1};
///   options.on_trace_ready = [](profiler::Profiler& p) {
///     p.export_chrome_trace("trace.json.gz");
///     std::cout << p.key_averages().table("cuda_time_total", 10);
///   };
///   profiler::Profiler profiler(options);
///   profiler.start();
///   for (…) { train_step(); profiler.step(); }
///   profiler.stop();
namespace fsdpp::profiler {

enum class Activity { Cpu, Cuda };

/// What happens in a step.
enum class Action { None, Warmup, Record, RecordAndSave };

/// skip_first steps nothing; then cycles of `wait` steps nothing, `warmup` steps traced and thrown away, `active` steps
/// kept, after which on_trace_ready is called. `repeat` cycles; 0: for ever. Each cycle replaces the last one's records.
struct Schedule {
  int64_t wait = 0;
  int64_t warmup = 0;
  int64_t active = 1;
  int64_t repeat = 0;
  int64_t skip_first = 0;

  /// Throws ConfigError on a negative number or active = 0.
  FSDPP_API void check() const;
  [[nodiscard]] FSDPP_API Action action(int64_t step) const noexcept;
};

class Profiler;

struct Options {
  std::vector<Activity> activities{Activity::Cpu, Activity::Cuda};
  bool record_shapes = false;   ///< of the operators' inputs
  bool profile_memory = false;  ///< allocations and frees, of the thread that calls start() and its backward threads
  bool with_flops = false;      ///< by formula, for matmul, convolution and attention; implies reading shapes
  /// Without one, everything between start() and stop() is one window.
  std::function<Action(int64_t step)> schedule;
  /// Called inside step() or stop() when a window is complete.
  std::function<void(Profiler&)> on_trace_ready;
  /// With profile_memory: called at each window's start for what the program holds since before it (parameters, optimizer
  /// state), which would else be "other" in the memory timeline. See memory_of().
  std::function<std::vector<MemoryEvent>()> known_memory;
  /// Device records that may be kept in a window; beyond it they are lost, counted and reported.
  int64_t device_buffer_bytes = int64_t{512} << 20;

  /// Lets `options.schedule = Schedule{…}` check at once. Throws ConfigError.
  FSDPP_API static std::function<Action(int64_t)> by(const Schedule& schedule);
};

/// One per process at a time (UsageError otherwise); start(), step() and stop() on one thread.
///
/// What is recorded: operators of LibTorch on all threads; scopes and collectives of fsdpp; with Activity::Cuda also kernels,
/// copies, runtime calls, waits (CUPTI, loaded at start). Without a GPU, without libcupti, or with another tool in its place
/// the host's part is recorded alone, and `trace().audit.notes` says why.
///
/// Cost: outside of windows nothing is installed. In them no call into CUPTI is made per operator.
/// CUDA graphs: a replayed kernel belongs to the operator and scope of its capture, when that was inside the same window.
class FSDPP_API Profiler {
 public:
  explicit Profiler(Options options = {});
  ~Profiler();  ///< stops without calling on_trace_ready
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  void start();
  /// The next step begins. Synchronises the device where a window begins or ends.
  void step();
  void stop();

  [[nodiscard]] int64_t step_number() const noexcept;
  /// The last complete window. Throws UsageError before there is one.
  [[nodiscard]] const Trace& trace() const;
  [[nodiscard]] KeyAverages key_averages(GroupBy by = GroupBy::Name) const;
  void export_chrome_trace(const std::string& path) const;
  /// Kept in every later trace.
  void add_metadata(const std::string& key, MetadataValue value);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdpp::profiler

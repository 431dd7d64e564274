#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/records.h"

/// Where the time of a window went. Every function is pure: it reads a Trace and nothing else, so each can be tested on
/// schedules made by hand. All times are nanoseconds; sums are exact.
namespace fsdpp::profiler {

/// The "device" of a trace without a GPU: operators of the host are the compute, collectives of the host the
/// communication.
inline constexpr int kHostDevice = -1;

struct Window {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  [[nodiscard]] int64_t length() const noexcept { return end_ns > start_ns ? end_ns - start_ns : 0; }
};

/// What is analysed. With steps: all of them. The host marks a step's end while the device may be far behind, so a step
/// ends when the host has marked its end and the device is done with what was launched until then, whichever is later;
/// and there the next one begins. The first begins likewise, but with its first work on the device where the host runs
/// ahead of it (launched for the second step before the device was done with the first). So the window of N steps is N
/// periods, of the device or of the host, whichever is the slower. Inside the trace's window.
/// Without steps the trace's window; without that the envelope of all records.
[[nodiscard]] FSDPP_API Window analysis_window(const Trace& trace);

/// The same as the host saw it: from its mark of the first step's start.
[[nodiscard]] FSDPP_API Window host_window(const Trace& trace, Window window);

/// The device with the most kernel time; kHostDevice if no kernel was recorded.
[[nodiscard]] FSDPP_API int main_device(const Trace& trace);

/// One thing that the device (or host) did, cut to the window.
struct Work {
  enum class Kind { Compute, Communication, Copy } kind = Kind::Compute;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int stream = 0;
  int64_t correlation = 0;
  int kernel = -1;      ///< index into Trace::kernels
  int collective = -1;  ///< index into Trace::collectives
  int op = -1;          ///< index into Trace::cpu_ops
  std::string unit;     ///< of communication: the collective's label, else the name of the scope around it
  std::string what;     ///< of communication: "all_gather", else the kernel's name
};

/// What ran on `device`, by start. A kernel is communication if a collective names it or its name starts with "nccl";
/// collectives without a kernel (copy engines) are communication with their own times. Records without times are left
/// out.
[[nodiscard]] FSDPP_API std::vector<Work> device_activities(const Trace& trace, int device, Window window);

/// The window, split. Every instant belongs to the first of these that is true: a compute kernel runs; a communication
/// kernel runs (exposed communication); a copy runs; idle. So compute + exposed + copy + idle = window.
struct TimeSplit {
  int64_t window_ns = 0;
  int64_t compute_ns = 0;
  int64_t exposed_ns = 0;
  int64_t copy_ns = 0;
  int64_t idle_ns = 0;
  int64_t communication_ns = 0;  ///< exposed and hidden
  /// Share of the communication that ran beside compute, 0 … 1; nothing without communication.
  [[nodiscard]] std::optional<double> overlap() const;
};
[[nodiscard]] FSDPP_API TimeSplit split_time(const std::vector<Work>& activities, Window window);

/// Communication of one unit.
struct UnitCommunication {
  std::string unit;
  int64_t calls = 0;
  int64_t bytes = 0;                             ///< of the full buffers
  int64_t total_ns = 0;                          ///< sum of the durations
  int64_t exposed_ns = 0;                        ///< its part of TimeSplit::exposed_ns
  std::map<std::string, int64_t> exposed_by_op;  ///< "all_gather" → ns
};

/// By exposed time, longest first. While several run exposed at once, the time goes to the one that started first; so
/// the sum over units is TimeSplit::exposed_ns exactly.
[[nodiscard]] FSDPP_API std::vector<UnitCommunication> exposed_communication(const Trace& trace,
                                                                             const std::vector<Work>& activities);

/// Why no compute kernel ran.
enum class IdleCause {
  Communication,    ///< a communication kernel ran, or the host waited for a collective
  DataLoader,       ///< the launching thread was inside a loader scope
  LaunchBound,      ///< the host had not yet launched the next work: it is late
  Synchronisation,  ///< the host had waited for the device, so the queue had run dry
  QueueFull,        ///< the host was stalled by a full launch queue
  Allocation,       ///< cudaMalloc, cudaFree and the like on the launching thread
  ModuleLoading,    ///< lazy loading of a kernel
  Profiler,         ///< CUPTI's own time
  Copy,             ///< a copy ran
  Dispatch,         ///< launched but not started: the device's latency, or an event of another stream
  Other
};
[[nodiscard]] FSDPP_API const char* to_string(IdleCause cause) noexcept;
inline constexpr int kIdleCauses = 11;

/// A piece of time without compute and with one cause.
struct IdlePiece {
  IdleCause cause = IdleCause::Other;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  int next = -1;  ///< index of the activity that ended the gap; -1: none
};

/// All time without a compute kernel, by start; lengths sum to window - compute.
///
/// A gap is [end of work, start of the next work). Up to the return of the call that launched the next work the host is
/// at fault: overheads, loader scopes, allocations, collectives and synchronisations of that thread claim their times
/// in the order queue full, module loading, profiler, loader, allocation, communication, synchronisation; what remains
/// is Synchronisation if the thread waited for the device during this part, else LaunchBound. After that call:
/// Communication while a collective of the host runs, else Dispatch. Without a launch record, or after the last work:
/// what claims it, else Other.
[[nodiscard]] FSDPP_API std::vector<IdlePiece> idle_pieces(const Trace& trace, const std::vector<Work>& activities,
                                                           Window window);

/// A gap, or part of one, in which the host was late.
struct LaunchGap {
  int64_t start_ns = 0;
  int64_t length_ns = 0;
  std::string kernel;  ///< that the device then ran
  std::string op;      ///< that launched it
};
struct LaunchGaps {
  int64_t count = 0;
  int64_t total_ns = 0;
  std::map<std::string, int64_t> by_op;  ///< the same by launching operator ("" unknown)
  std::vector<LaunchGap> longest;        ///< at most `limit`, longest first
};
[[nodiscard]] FSDPP_API LaunchGaps launch_gaps(const Trace& trace, const std::vector<Work>& activities,
                                               const std::vector<IdlePiece>& idle, int limit = 20);

/// Launched and not yet started work, counted at each launch.
struct LaunchQueue {
  int64_t max_depth = 0;
  double mean_depth = 0;
  int64_t full_count = 0;  ///< times the host was stalled by a full queue ("COMMAND_BUFFER_FULL")
  int64_t full_ns = 0;
};
[[nodiscard]] FSDPP_API LaunchQueue launch_queue(const Trace& trace, int device, Window window);

/// Waits: time inside loader scopes of the threads that mark steps (of all threads if there are no steps). The loader scopes of
/// other threads are those that prepare data: where a wait and they coincide, the loader is too slow (more threads, cheaper
/// samples); the rest of a wait is hand-over and the copy to the device.
struct LoaderWait {
  int64_t total_ns = 0;
  int64_t longest_ns = 0;
  int64_t count = 0;
  int64_t starved_ns = 0;     ///< of total_ns, while a loader thread was preparing
  int64_t prepare_ns = 0;     ///< inside loader scopes of other threads, summed over them
  int64_t prepare_count = 0;
};
[[nodiscard]] FSDPP_API LoaderWait loader_wait(const Trace& trace, Window window);

struct StepTime {
  int64_t step = 0;
  int64_t start_ns = 0;
  TimeSplit split;        ///< of its part of the window (analysis_window)
  int64_t loader_ns = 0;  ///< between its marks on the host
};
/// The parts lie side by side: they sum to the window, unless steps are missing between others.
[[nodiscard]] FSDPP_API std::vector<StepTime> step_times(const Trace& trace, const std::vector<Work>& activities,
                                                         Window window);

struct KernelSummary {
  std::string name;
  int64_t count = 0;
  int64_t total_ns = 0;
  int64_t min_ns = 0;
  int64_t max_ns = 0;
  double share = 0;  ///< of the time of all kernels
  bool communication = false;
  int example = -1;  ///< index of its longest occurrence in Trace::kernels
};
/// By total time, longest first; at most `limit` (0: all). On the host device: operators by own time.
[[nodiscard]] FSDPP_API std::vector<KernelSummary> top_kernels(const Trace& trace, int device, Window window,
                                                               int limit = 20);

inline constexpr int kMemoryCategories = 6;  ///< of MemoryEvent::Category, in its order
[[nodiscard]] FSDPP_API const char* to_string(MemoryEvent::Category category) noexcept;

struct MemoryPoint {
  int64_t time_ns = 0;
  std::array<int64_t, kMemoryCategories> bytes{};  ///< live, by category
  [[nodiscard]] int64_t total() const noexcept;
};
/// Blocks alive at the peak, by category and owner.
struct MemoryOwner {
  MemoryEvent::Category category = MemoryEvent::Category::Other;
  std::string owner;  ///< the scope's name, else the operator's, else ""
  int64_t bytes = 0;
  int64_t blocks = 0;
};
struct MemoryTimeline {
  int device = kHostDevice;
  int64_t bytes_before = 0;         ///< alive before the first event and unknown to the program; counted as Other
  MemoryPoint peak;                 ///< the first instant of the highest total
  std::vector<MemoryOwner> owners;  ///< at the peak, largest first; sums to the peak without `bytes_before`
  std::vector<MemoryPoint> points;  ///< at most `limit`; of each stretch the highest, the peak among them
};
/// A block that is given back leaves the category under which it was taken, whatever the later event says.
[[nodiscard]] FSDPP_API MemoryTimeline memory_timeline(const Trace& trace, int device, int limit = 400);

/// All of the above for one trace.
struct Analysis {
  int rank = 0;
  int device = kHostDevice;
  Window window;
  TimeSplit split;
  std::vector<Work> activities;
  std::vector<UnitCommunication> units;
  std::vector<IdlePiece> idle;
  std::array<int64_t, kIdleCauses> idle_ns{};  ///< by IdleCause
  LaunchGaps gaps;
  LaunchQueue queue;
  LoaderWait loader;
  std::vector<StepTime> steps;
  std::vector<KernelSummary> kernels;  ///< all of them
  MemoryTimeline memory;
};
[[nodiscard]] FSDPP_API Analysis analyse(const Trace& trace);

}  // namespace fsdpp::profiler

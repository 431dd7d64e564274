#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/analysis.h"
#include "fsdpp/profiler/records.h"

/// How close each kernel came to what the hardware can do, what holds it back, and what to do about it.
///
/// Percentages are of the device's peak over the kernel's time (0 … 100); values that nobody knows are absent, never 0.
/// Words: docs/architecture.md.
namespace fsdpp::profiler {

/// Where the numbers come from, best first. A report prints the label beside every number.
enum class Source { Measured, Sampled, Modelled, TimeOnly };
/// "measured (range profiler)", "sampled (PM sampling)", "modelled (FLOPs and bytes of the operator)", "time only".
[[nodiscard]] FSDPP_API const char* to_string(Source source) noexcept;

/// One way to get numbers and, if it can't be used, why.
struct Rung {
  Source source = Source::TimeOnly;
  bool usable = false;
  std::string reason;  ///< empty when usable
};
struct LadderChoice {
  Source source = Source::TimeOnly;
  std::string text;  ///< "speed of light: LABEL", then each better rung and the reason against it
};
/// The best usable rung; TimeOnly is always usable. The order of `rungs` is free.
[[nodiscard]] FSDPP_API LadderChoice choose_source(std::span<const Rung> rungs);

/// Why CUPTI refused counters and the way out. `driver_params` is the text of /proc/driver/nvidia/params, or empty.
[[nodiscard]] FSDPP_API std::string explain_counter_error(int cupti_result, const std::string& driver_params);

/// Roofs of the device: measured ones if there are any (see bench_kernels), with their origin in words.
struct Ceilings {
  double flops_per_s = 0;
  double bytes_per_s = 0;
  double l2_bytes_per_s = 0;  ///< 0: unknown
  std::string origin;         ///< "measured on this device", "data sheet", …
  [[nodiscard]] bool known() const noexcept { return flops_per_s > 0 && bytes_per_s > 0; }
  /// FLOP per byte at which both roofs meet.
  [[nodiscard]] double ridge() const noexcept { return flops_per_s / bytes_per_s; }
};
/// Of H100 and H200 (dense bf16, HBM) from NVIDIA's data sheets; unknown otherwise. `name` as CUDA reports it.
[[nodiscard]] FSDPP_API Ceilings data_sheet_ceilings(const std::string& name);

/// What is known about all occurrences of one kernel.
struct KernelLight {
  std::string name;
  std::string op;      ///< that launches it most often
  std::string shapes;  ///< of the longest occurrence's operator
  Source source = Source::TimeOnly;
  int64_t count = 0;
  double total_ns = 0;
  std::optional<double> compute_percent;  ///< the larger of tensor pipe and instruction issue
  std::optional<double> memory_percent;   ///< DRAM
  std::optional<double> l2_percent;
  std::optional<double> l1_percent;
  std::optional<double> occupancy_percent;  ///< active warps of the possible ones
  std::optional<double> flops;              ///< of all occurrences
  std::optional<double> bytes;              ///< to and from DRAM, of all occurrences
  std::optional<double> waves;              ///< blocks of the grid over the blocks that fit on the device at once
  std::string occupancy_limit;              ///< "registers", "shared memory", "threads", "blocks"
  double idle_before_ns = 0;                ///< device idle before it because the host was late; sum
  std::optional<double> wait_ns;            ///< of a collective: time beyond the fastest rank's; sum
  int straggler = -1;                       ///< the rank that the others most often waited for
  bool communication = false;
};

enum class Bound {
  Memory,          ///< the seed's rule: compute < 25 and memory > 75
  MemoryLeaning,   ///< memory >= 60 and more than 10 above compute
  Cache,           ///< DRAM < 50 and L2 or L1 > 75
  Compute,         ///< the seed's rule: compute > 75 and memory < 50
  ComputeLeaning,  ///< compute >= 60 and memory < 60
  Balanced,        ///< one of them >= 60 and none of the above
  Latency,         ///< both < 60
  Launch,          ///< the device idled before it for longer than it ran because the host was late
  Wait,            ///< a collective that waited for a slower rank for more than half of its time
  Communication,   ///< any other collective
  Unknown          ///< no numbers
};
[[nodiscard]] FSDPP_API const char* to_string(Bound bound) noexcept;

struct Verdict {
  Bound bound = Bound::Unknown;
  std::string fix;            ///< what to do, with the kernel's own numbers
  double recoverable_ns = 0;  ///< total · (1 − max(compute, memory) / 100), plus idle before it; waits for collectives
};
/// One class for each kernel. The seed's two rules come first and are exact; then Wait and Communication for
/// collectives, Launch, Cache, MemoryLeaning, ComputeLeaning, Balanced, Latency.
[[nodiscard]] FSDPP_API Verdict judge(const KernelLight& kernel);

/// A point under the roofline.
struct RooflinePoint {
  double intensity = 0;         ///< FLOP per byte
  double flops_per_s = 0;       ///< achieved
  double roof_flops_per_s = 0;  ///< min(compute roof, intensity · memory roof)
  double fraction = 0;          ///< achieved over roof
  bool memory_side = false;     ///< left of the ridge
};
/// Nothing without FLOPs, bytes, time or ceilings.
[[nodiscard]] FSDPP_API std::optional<RooflinePoint> roofline_point(const KernelLight& kernel,
                                                                    const Ceilings& ceilings);

/// Bytes that an operator must at least read and write, from its "shapes" and "dtypes" (records.h); 0: unknown.
/// Outputs: of a matrix product its result; otherwise as large as the largest input.
[[nodiscard]] FSDPP_API double model_bytes(const CpuOp& op);

/// How many blocks of a kernel fit on one multiprocessor, and what stops more.
struct Occupancy {
  int blocks = 0;
  double percent = 0;  ///< warps of these blocks over the possible ones
  std::string limit;
};
[[nodiscard]] FSDPP_API Occupancy occupancy(const Kernel& kernel, const Device& device);

/// Counters of one kernel or range: metric name → value, and the ordinal of its launch in the step.
using CounterValues = std::map<std::string, double>;

/// Puts counters of the V1, V2 or roofline sets (speed_of_light_metrics.h) into `kernel`. Percentages are means
/// weighted by time; FLOPs and bytes are scaled from the counted occurrences to all `count` of them.
FSDPP_API void apply_counters(KernelLight& kernel, std::span<const CounterValues> occurrences, Source source,
                              const Ceilings& ceilings);

/// Counters by kernel name.
using CountersByKernel = std::map<std::string, std::vector<CounterValues>>;

/// Joins the ranges of a counted step, in launch order, with the kernels of a traced step. Throws UsageError if the
/// number of ranges differs from the number of kernels: then the steps did not launch the same sequence.
[[nodiscard]] FSDPP_API CountersByKernel join_ranges(std::span<const CounterValues> ranges,
                                                     std::span<const std::string> kernels);

/// A sample of the performance monitors: rates over [start_ns, end_ns) on the trace's clock.
struct CounterSample {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  CounterValues values;
};
/// For each kernel of `device` that spans at least two samples on average: means of the samples, weighted by the time
/// that they share with it. Shorter kernels are named in `too_short`: they need the range profiler.
[[nodiscard]] FSDPP_API CountersByKernel attribute_samples(std::span<const CounterSample> samples, const Trace& trace,
                                                           int device, std::vector<std::string>& too_short);

/// Time that ranks spent in a collective beyond the fastest rank's, by label.
struct CollectiveWait {
  std::string label;
  std::string op;
  int64_t calls = 0;
  int64_t wait_ns = 0;  ///< summed over ranks and calls
  int straggler = -1;   ///< the rank that was fastest, so arrived last, for the largest part of the wait
};
/// Only collectives that at least two of the traces hold; longest first.
[[nodiscard]] FSDPP_API std::vector<CollectiveWait> collective_waits(std::span<const Trace> ranks);

/// What may be counted at once.
struct CounterRequest {
  std::string set = "V1";
  int passes = 1;            ///< as the Profiler Host API counts them
  bool replay_steps = true;  ///< pass k on step k, on all ranks alike; false: each kernel is replayed on the spot
  int world_size = 1;
  int64_t collectives = 0;  ///< in one step, of this rank
};
struct CounterPlan {
  bool allowed = false;
  int steps = 0;                    ///< steps to count
  bool serialises_kernels = false;  ///< one kernel at a time, so ranks must launch collectives in the same order
  std::string reason;               ///< of a refusal, with the way out
};
/// Never replays a collective: replaying kernels on the spot is refused for more than one pass when a step
/// communicates, since peers do not replay and their buffers are not restored.
[[nodiscard]] FSDPP_API CounterPlan plan_counters(const CounterRequest& request);

/// Counters that were collected for a trace.
struct Counters {
  std::vector<Rung> rungs;  ///< what was tried
  Source source = Source::TimeOnly;
  CountersByKernel by_kernel;
  std::vector<std::string> notes;  ///< what is missing, one line each
};

/// Names of the kernels of `device` in the order of their launches, of the first step of the trace (without steps: of
/// all of it).
[[nodiscard]] FSDPP_API std::vector<std::string> launch_order(const Trace& trace, int device);

/// Counters of one step's kernels, in launch order, for the kernels of a traced step of the same program: join_ranges()
/// over launch_order() of the trace's main device.
[[nodiscard]] FSDPP_API Counters counters_of_step(const Trace& trace, std::span<const CounterValues> ranges,
                                                  std::vector<Rung> rungs);

/// Counters from samples that were taken beside the trace. Where no kernel gets any, a rung says why.
[[nodiscard]] FSDPP_API Counters counters_of_samples(const Trace& trace, std::span<const CounterSample> samples,
                                                     std::vector<Rung> rungs);

/// Every kernel of the analysis, in its order: counters where there are any, else the model (FLOPs and bytes of the
/// operators against `ceilings`), else time only. `ranks` are for waits of collectives.
[[nodiscard]] FSDPP_API std::vector<KernelLight> speed_of_light(const Trace& trace, const Analysis& analysis,
                                                                const Ceilings& ceilings, const Counters& counters = {},
                                                                std::span<const CollectiveWait> waits = {});

}  // namespace fsdpp::profiler

#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/profiler/speed_of_light.h"

/// Hardware counters through CUPTI, which is loaded at run time. No CUPTI type appears here.
///
///   auto ranges = open_range_counters(0, {"V1"}, 50'000);
///   do { ranges->begin_step(); train_step(); } while (!ranges->end_step());
///   for (const CounterValues& kernel : ranges->ranges()) …
///
/// step_counters.h does this for a training program: sets in turn, names of kernels, ranks in step.
namespace fsdpp::profiler {

enum class CounterKind { Range, PmSampling };

/// Which metrics a chip has and how many passes a set takes: CUPTI's Profiler Host API, which needs no GPU.
class FSDPP_API MetricTable {
 public:
  virtual ~MetricTable();
  [[nodiscard]] virtual bool has(const std::string& metric) const = 0;
  /// Passes for `metrics` together; 0 if they can't be collected together, or one is unknown.
  [[nodiscard]] virtual int passes(const std::vector<std::string>& metrics) const = 0;
  /// How many base metrics the chip has: counters, ratios and throughputs.
  [[nodiscard]] virtual int64_t size() const = 0;
};
/// `chip` as CUPTI calls it ("GH100" is H100 and H200). `library`: path of libcupti, or empty for the loader's own
/// search. Throws ConfigError where CUPTI can't be loaded or does not know the chip.
[[nodiscard]] FSDPP_API std::unique_ptr<MetricTable> open_metric_table(const std::string& chip, CounterKind kind,
                                                                       const std::string& library = {});
[[nodiscard]] FSDPP_API std::vector<std::string> counter_chips(const std::string& library = {});

/// Which ways to counters are open on this device, for choose_source(). Never throws: a reason says what is in the way.
/// Needs the CUDA context of the device to be current.
[[nodiscard]] FSDPP_API std::vector<Rung> probe_counters(int device, const std::string& library = {});

/// Counts every kernel of whole training steps, one pass a step, by the range profiler (automatic ranges, replay by
/// steps). Kernels run one at a time meanwhile, so times of these steps say nothing about training.
class FSDPP_API RangeCounters {
 public:
  virtual ~RangeCounters();  ///< ends counting
  /// Around one training step, on all ranks alike. end_step() returns true when all passes are done.
  virtual void begin_step() = 0;
  virtual bool end_step() = 0;
  /// One entry for each kernel launched between begin_step() and end_step(), in launch order. Once, after the last
  /// step.
  [[nodiscard]] virtual std::vector<CounterValues> ranges() = 0;
  [[nodiscard]] virtual int64_t dropped() const = 0;
};
/// `request.set` must be a set of speed_of_light_metrics.h. Throws UsageError where plan_counters() refuses, and
/// ConfigError where CUPTI does, with the reason and the way out.
[[nodiscard]] FSDPP_API std::unique_ptr<RangeCounters> open_range_counters(int device, CounterRequest request,
                                                                           int max_kernels,
                                                                           const std::string& library = {});

/// Samples the performance monitors at a fixed interval beside everything else; nothing is replayed or serialised.
class FSDPP_API PmSampler {
 public:
  virtual ~PmSampler();  ///< ends sampling
  virtual void start() = 0;
  /// Ends sampling and returns all samples by time, at most `max_samples` of open_pm_sampler().
  [[nodiscard]] virtual std::vector<CounterSample> stop() = 0;
  [[nodiscard]] virtual bool overflowed() const = 0;
};
/// Throws ConfigError where CUPTI refuses, with the reason and the way out.
[[nodiscard]] FSDPP_API std::unique_ptr<PmSampler> open_pm_sampler(int device, const std::string& set = "V1-PM",
                                                                   int64_t interval_ns = 50'000,
                                                                   int64_t max_samples = 200'000,
                                                                   const std::string& library = {});

}  // namespace fsdpp::profiler

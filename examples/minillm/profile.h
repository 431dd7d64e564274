#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/profiler/profiler.h"
#include "fsdpp/profiler/step_counters.h"
#include "options.h"
#include "place.h"

namespace minillm {

/// What --profile asks for; nothing at all without it. In DIR, on rank 0: trace.json.gz with all ranks (Perfetto opens
/// it), step.json.gz with the first of the steps alone, report.html, report.json, and table.txt. Methods are
/// collective.
class Profile {
 public:
  using KnownMemory = std::function<std::vector<fsdpp::profiler::MemoryEvent>()>;
  /// `known_memory`: what is allocated already when the window begins.
  Profile(const Options& options, const Place& place, KnownMemory known_memory);
  void start();
  /// After each step.
  void step();
  /// Writes the files and says where. Throws fsdpp::Error where they can't be written.
  [[nodiscard]] std::string finish();

 private:
  enum class Phase { Off, Tracing, Counting, Sampling, Over };
  void begin_counting();
  void begin_sampling();
  void end_counting();
  void end_sampling();
  [[nodiscard]] std::vector<fsdpp::profiler::Counters> all_counters();

  const Options& options_;
  const Place& place_;
  Phase phase_ = Phase::Off;
  std::unique_ptr<fsdpp::profiler::Profiler> profiler_, beside_samples_;
  std::unique_ptr<fsdpp::profiler::StepCounters> counting_;
  std::unique_ptr<fsdpp::profiler::PmSampler> sampler_;
  fsdpp::profiler::Counters counters_;
  bool traced_ = false;  ///< the window is complete
};

/// Wait and warm up before three steps, as far as there are so many.
[[nodiscard]] fsdpp::profiler::Schedule profile_schedule(int64_t steps);

}  // namespace minillm

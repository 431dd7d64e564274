#pragma once
#include <string>
#include <vector>

#include "fsdpp/base/export.h"

/// Two reports against each other, so that a pipeline can stop when training became slower.
namespace fsdpp::profiler {

struct CompareOptions {
  double threshold_percent = 5;  ///< growth beyond this is a regression
  /// Growth below these is noise whatever the percentage: times a step, and memory.
  double floor_ms = 0.01;
  double floor_bytes = 1 << 20;
};

/// One figure of the reports' summaries; all are better when smaller.
struct Difference {
  enum class Verdict { Same, Better, Regression } verdict = Verdict::Same;
  std::string figure;  ///< "step", "exposed communication", "unit layers.0", "kernel NAME", "idle launch-bound", "peak
                       ///< memory", …
  double before = 0;   ///< ms a step, or bytes; 0 where the first report lacks it
  double after = 0;    ///< 0 where the second report lacks it
  bool bytes = false;
  /// Growth in percent; infinite for what is new.
  [[nodiscard]] FSDPP_API double percent() const;
};

struct Comparison {
  std::vector<Difference> rows;  ///< regressions by growth first, then what became better, then the rest
  [[nodiscard]] FSDPP_API bool regressed() const;
  /// Lines for people: what changed beyond the threshold, and the step.
  [[nodiscard]] FSDPP_API std::string text() const;
};

/// Of two texts of report_json(). A figure that only one of them has is compared with 0. Throws UsageError for anything
/// else than two reports of this format.
[[nodiscard]] FSDPP_API Comparison compare(const std::string& before, const std::string& after,
                                           const CompareOptions& options = {});

}  // namespace fsdpp::profiler

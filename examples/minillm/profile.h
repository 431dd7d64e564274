#pragma once
#include <memory>
#include <string>

#include "fsdpp/profiler/profiler.h"
#include "options.h"
#include "place.h"

namespace minillm {

/// What --profile asks for; nothing at all without it. In DIR, on rank 0: trace.json.gz with all ranks (Perfetto opens it),
/// report.html, report.json, and table.txt of rank 0. Methods are collective.
class Profile {
 public:
  Profile(const Options& options, const Place& place);
  void start();
  /// After each step.
  void step();
  /// Writes the files and says where. Throws fsdpp::Error where they can't be written.
  [[nodiscard]] std::string finish();

 private:
  const Options& options_;
  const Place& place_;
  std::unique_ptr<fsdpp::profiler::Profiler> profiler_;
};

/// Wait and warm up before three steps, as far as there are so many.
[[nodiscard]] fsdpp::profiler::Schedule profile_schedule(int64_t steps);

}  // namespace minillm

#pragma once
#include <vector>

#include "profiler/host_log.h"
#include "profiler/intervals.h"

namespace fsdpp::profiler {

/// The innermost operator and scope at a moment of a thread. Makes the trace's derived scopes and the scopes' parents.
class Places {
 public:
  explicit Places(Trace& trace);

  [[nodiscard]] int op(int64_t thread, int64_t time) const { return ops_.innermost(thread, time); }
  [[nodiscard]] int scope(int64_t thread, int64_t time) const;
  [[nodiscard]] const std::vector<int>& op_parents() const noexcept { return ops_.parents(); }

 private:
  struct Span {
    int64_t start, end, thread;
    int scope;
  };
  const Trace& trace_;
  IntervalIndex ops_;
  IntervalIndex scopes_;      // those that were opened: they nest
  std::vector<Span> spans_;  // derived ones, by start: they may overlap
};

/// Gives each collective its device times, by the kernels and copies that were launched while it was issued.
void place_collectives(Trace& trace, std::vector<RawCollective> raw, const Places& places);

/// Operators and scopes of memory events, categories, and the operators' sums of bytes.
void place_memory(Trace& trace, const Places& places);

}  // namespace fsdpp::profiler

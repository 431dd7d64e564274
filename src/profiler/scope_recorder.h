#pragma once
#include "fsdpp/trace/scope.h"

namespace fsdpp::profiler {

/// Writes scopes and collectives into the host log.
class ScopeRecorder : public trace::Listener {
 public:
  void begin(const trace::Event& event) noexcept override;
  void end(const trace::Event& event) noexcept override;
  void begin(const trace::CollectiveEvent& event) noexcept override;
  void end(const trace::CollectiveEvent& event) noexcept override;

  /// One for the process, never destroyed: a scope may end after its window.
  static ScopeRecorder& instance();
};

}  // namespace fsdpp::profiler

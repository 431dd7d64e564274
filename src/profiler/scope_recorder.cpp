#include "profiler/scope_recorder.h"

#include "profiler/clock.h"
#include "profiler/host_log.h"

namespace fsdpp::profiler {
namespace {

/// Recording must not make the program fail: without memory the record is lost.
template <class Write>
void record(Write&& write) noexcept {
  try {
    HostLog::instance().write(write);
  } catch (...) {
  }
}

}  // namespace

ScopeRecorder& ScopeRecorder::instance() {
  static auto* recorder = new ScopeRecorder;
  return *recorder;
}

void ScopeRecorder::begin(const trace::Event& event) noexcept {
  record([&](ThreadLog& log) {
    Scope scope;
    scope.kind = event.kind;
    scope.name = event.name;
    scope.bytes = event.bytes;
    scope.thread = log.records.thread;
    scope.start_ns = now_ns();
    log.open_scopes.push_back(log.records.scopes.size());
    log.records.scopes.push_back(std::move(scope));
  });
}

void ScopeRecorder::end(const trace::Event& event) noexcept {
  const int64_t now = now_ns();
  record([&](ThreadLog& log) {
    if (log.open_scopes.empty()) return;  // began before the window
    Scope& scope = log.records.scopes[log.open_scopes.back()];
    if (scope.kind != event.kind || scope.name != event.name) return;
    scope.end_ns = now;
    log.open_scopes.pop_back();
  });
}

void ScopeRecorder::begin(const trace::CollectiveEvent& event) noexcept {
  record([&](ThreadLog& log) {
    RawCollective raw;
    raw.in_group = event.in_group;
    Collective& c = raw.collective;
    c.comm = event.comm;
    c.op = event.op;
    c.label = event.label;
    c.sequence = event.sequence;
    c.bytes = event.bytes;
    c.thread = log.records.thread;
    c.issued_ns = c.start_ns = now_ns();
    log.open_collectives.push_back(log.records.collectives.size());
    log.records.collectives.push_back(std::move(raw));
  });
}

void ScopeRecorder::end(const trace::CollectiveEvent& event) noexcept {
  const int64_t now = now_ns();
  record([&](ThreadLog& log) {
    if (log.open_collectives.empty()) return;
    Collective& c = log.records.collectives[log.open_collectives.back()].collective;
    if (c.sequence != event.sequence || c.op != event.op) return;
    c.end_ns = now;
    log.open_collectives.pop_back();
  });
}

}  // namespace fsdpp::profiler

#include "fsdpp/profiler/profiler.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>

#include "base/enforce.h"
#include "fsdpp/base/log.h"
#include "fsdpp/base/rank_env.h"
#include "profiler/assemble.h"
#include "profiler/clock.h"
#include "profiler/cpu_observer.h"
#include "profiler/device_source.h"
#include "profiler/host_log.h"
#include "profiler/scope_recorder.h"
#include "profiler/session.h"

namespace fsdpp::profiler {
namespace {

std::atomic<bool> in_use{false};

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

bool wants(const Options& options, Activity activity) {
  return std::find(options.activities.begin(), options.activities.end(), activity) != options.activities.end();
}

}  // namespace

struct Profiler::Impl : Recorder {
  explicit Impl(Options given, Profiler& self)
      : options(std::move(given)),
        session(options.schedule, *this, [this, &self] { if (options.on_trace_ready) options.on_trace_ready(self); }) {}

  void begin() override;
  void keep() override;
  void discard() override;
  void end_recording();
  void mark(int64_t step) override;
  void report(const Audit& audit) const;

  Options options;
  Session session;
  std::unique_ptr<DeviceSource> device;
  std::unique_ptr<CpuObserver> cpu;
  trace::Listener* previous_listener = nullptr;
  std::optional<Trace> last;
  std::map<std::string, MetadataValue> metadata;
  RecordedWindow window;
  int64_t clock_lead = 0;
  int64_t step_start = 0;
};

void Profiler::Impl::begin() {
  if (!device)
    device = wants(options, Activity::Cuda) ? make_device_source(options.device_buffer_bytes) : make_no_device_source("");
  window = {};
  window.record_shapes = options.record_shapes;
  window.profile_memory = options.profile_memory;
  window.with_flops = options.with_flops;
  if (options.profile_memory && options.known_memory) window.known_memory = options.known_memory();
  device->begin();
  clock_lead = clock_lead_ns();
  window.start_ns = step_start = now_ns();
  HostLog::instance().open();
  previous_listener = trace::listener();
  trace::set_listener(&ScopeRecorder::instance());
  if (wants(options, Activity::Cpu))
    cpu = std::make_unique<CpuObserver>(options.record_shapes || options.with_flops, options.profile_memory);
}

void Profiler::Impl::end_recording() {
  cpu.reset();
  trace::set_listener(previous_listener);
  window.end_ns = now_ns();
  window.clock_shift_ns = clock_lead_ns() - clock_lead;
}

void Profiler::Impl::discard() {
  device->synchronize();
  end_recording();
  (void)HostLog::instance().close();
  (void)device->end();
}

void Profiler::Impl::keep() {
  device->synchronize();  // its work belongs to the window
  end_recording();
  HostRecords host = HostLog::instance().close();
  Trace trace = assemble(std::move(host), device->end(), window);
  const RankEnv env = detect_rank_env();
  trace.rank = env.rank;
  trace.world_size = env.world_size;
  trace.host = host_name();
  trace.process = getpid();
  trace.metadata = metadata;
  report(trace.audit);
  last = std::move(trace);
}

void Profiler::Impl::mark(int64_t step) {
  const int64_t now = now_ns();
  window.steps.push_back({step, step_start, now, thread_id()});
  step_start = now;
}

void Profiler::Impl::report(const Audit& audit) const {
  for (const std::string& error : audit.errors) log::error("profiler: " + error);
  for (const std::string& note : audit.notes) log::info("profiler: " + note);
}

Profiler::Profiler(Options options) {
  FSDPP_ENFORCE(!options.activities.empty(), ConfigError, "Profiler: expected at least one activity, got none");
  FSDPP_ENFORCE(options.device_buffer_bytes > 0, ConfigError, "Profiler: expected device_buffer_bytes above 0, got {}",
                options.device_buffer_bytes);
  impl_ = std::make_unique<Impl>(std::move(options), *this);
}

Profiler::~Profiler() {
  if (!impl_->session.running()) return;
  try {
    impl_->session.abandon();
  } catch (const std::exception& error) {
    log::error(std::string("profiler: ") + error.what());
  }
  in_use = false;
}

void Profiler::start() {
  FSDPP_ENFORCE(impl_->session.running() || !in_use.exchange(true), UsageError,
                "Profiler::start: another profiler runs in this process. Try: stop it first.");
  try {
    impl_->session.start();
  } catch (...) {
    in_use = impl_->session.running();
    throw;
  }
}

void Profiler::step() { impl_->session.step(); }

void Profiler::stop() {
  FSDPP_ENFORCE(impl_->session.running(), UsageError, "Profiler::stop: expected a running profiler. Try: start() first.");
  in_use = false;  // also if what follows throws
  impl_->session.stop();
}

int64_t Profiler::step_number() const noexcept { return impl_->session.step_number(); }

const Trace& Profiler::trace() const {
  FSDPP_ENFORCE(impl_->last.has_value(), UsageError,
                "Profiler: there is no trace yet. Try: after stop(), or in on_trace_ready, once the schedule's active steps are over.");
  return *impl_->last;
}

KeyAverages Profiler::key_averages(GroupBy by) const { return profiler::key_averages(trace(), by); }

void Profiler::export_chrome_trace(const std::string& path) const { profiler::export_chrome_trace(path, trace()); }

void Profiler::add_metadata(const std::string& key, MetadataValue value) {
  if (impl_->last) impl_->last->metadata[key] = value;
  impl_->metadata[key] = std::move(value);
}

}  // namespace fsdpp::profiler

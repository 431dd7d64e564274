#include "profiler/host_log.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace fsdpp::profiler {

int64_t thread_id() noexcept {
  thread_local const int64_t id = syscall(SYS_gettid);
  return id;
}

HostLog& HostLog::instance() {
  static auto* log = new HostLog;  // never destroyed: threads may outlive static objects
  return *log;
}

void HostLog::open() noexcept { window_.store(++last_window_, std::memory_order_release); }

ThreadLog& HostLog::mine() {
  thread_local std::shared_ptr<ThreadLog> log;
  if (!log) {
    log = std::make_shared<ThreadLog>();
    log->records.thread = thread_id();
    std::lock_guard lock(mutex_);
    logs_.push_back(log);
  }
  return *log;
}

void HostLog::reset(ThreadLog& log, uint64_t window) {
  const int64_t thread = log.records.thread;
  log.records = {};
  log.records.thread = thread;
  log.open_scopes.clear();
  log.open_collectives.clear();
  log.window = window;
}

HostRecords HostLog::close() {
  const uint64_t window = window_.exchange(0, std::memory_order_acq_rel);
  HostRecords all;
  std::lock_guard lock(mutex_);
  for (const auto& log : logs_) {
    std::lock_guard thread_lock(log->mutex);
    if (window != 0 && log->window == window) all.push_back(std::move(log->records));
    const int64_t thread = window != 0 && log->window == window ? all.back().thread : log->records.thread;
    log->records.thread = thread;
    reset(*log, 0);
  }
  std::erase_if(logs_, [](const auto& log) { return log.use_count() == 1; });  // its thread has ended
  return all;
}

}  // namespace fsdpp::profiler

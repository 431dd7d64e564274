#include "fsdpp/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/enforce.h"
#include "base/env.h"

namespace fsdpp {
namespace {

struct RankLabel {
  int rank = -1;
  int world_size = 0;
};
RankLabel process_rank;
std::atomic<int64_t> process_iteration = -1;  // read by watchdogs and workers
thread_local RankLabel thread_rank;
thread_local int64_t thread_iteration = -1;

bool rank_is_thread() { return thread_rank.rank >= 0; }

// Never destroyed: log lines may come from other static destructors.
spdlog::logger& logger() {
  static auto* instance = [] {
    auto* l = new std::shared_ptr<spdlog::logger>(
        std::make_shared<spdlog::logger>("fsdpp", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
    (*l)->set_pattern("[fsdpp %H:%M:%S.%e %l] %v");
    (*l)->set_level(spdlog::level::from_str(env::get("FSDPP_LOG").value_or("warn")));
    return l;
  }();
  return **instance;
}

void write(spdlog::level::level_enum level, std::string_view message) noexcept {
  try {
    if (logger().should_log(level)) logger().log(level, "{}{}", rank_prefix(), message);
  } catch (...) {
  }
}

}  // namespace

std::string rank_prefix() {
  auto r = rank_is_thread() ? thread_rank : process_rank;
  int64_t iteration = rank_is_thread() ? thread_iteration : process_iteration.load();
  if (r.rank < 0) return {};
  return iteration < 0 ? fmt::format("[rank {}/{}] ", r.rank, r.world_size)
                       : fmt::format("[rank {}/{}, iteration {}] ", r.rank, r.world_size, iteration);
}

namespace log {
void debug(std::string_view m) noexcept { write(spdlog::level::debug, m); }
void info(std::string_view m) noexcept { write(spdlog::level::info, m); }
void warn(std::string_view m) noexcept { write(spdlog::level::warn, m); }
void error(std::string_view m) noexcept { write(spdlog::level::err, m); }
void set_rank(int rank, int world_size, bool for_this_thread) noexcept {
  (for_this_thread ? thread_rank : process_rank) = {rank, world_size};
}
void set_iteration(int64_t iteration) noexcept {
  if (rank_is_thread())
    thread_iteration = iteration;
  else
    process_iteration = iteration;
}
}  // namespace log
}  // namespace fsdpp

#include "fsdpp/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

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
thread_local RankLabel thread_rank;

RankLabel current_rank() { return thread_rank.rank >= 0 ? thread_rank : process_rank; }

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
  auto r = current_rank();
  return r.rank < 0 ? std::string{} : fmt::format("[rank {}/{}] ", r.rank, r.world_size);
}

namespace log {
void debug(std::string_view m) noexcept { write(spdlog::level::debug, m); }
void info(std::string_view m) noexcept { write(spdlog::level::info, m); }
void warn(std::string_view m) noexcept { write(spdlog::level::warn, m); }
void error(std::string_view m) noexcept { write(spdlog::level::err, m); }
void set_rank(int rank, int world_size, bool for_this_thread) noexcept {
  (for_this_thread ? thread_rank : process_rank) = {rank, world_size};
}
}  // namespace log
}  // namespace fsdpp

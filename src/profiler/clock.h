#pragma once
#include <ctime>

#include <cstdint>

namespace fsdpp::profiler {

inline int64_t read_clock(clockid_t clock) noexcept {
  timespec t{};
  clock_gettime(clock, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}
/// The clock of all records; CUPTI's own default too.
inline int64_t now_ns() noexcept { return read_clock(CLOCK_REALTIME); }
/// How far the wall clock is ahead of one that nobody sets: its change in a window is a step of the wall clock.
inline int64_t clock_lead_ns() noexcept { return read_clock(CLOCK_REALTIME) - read_clock(CLOCK_MONOTONIC); }

}  // namespace fsdpp::profiler

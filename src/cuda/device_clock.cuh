#pragma once

namespace fsdpp::cuda {

__device__ inline unsigned long long nanoseconds_now() {
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void spin_until(unsigned long long end) {
  do {
    __nanosleep(500);
  } while (nanoseconds_now() < end);
}

}  // namespace fsdpp::cuda

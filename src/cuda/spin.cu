#include <cuda_runtime.h>

#include "cuda/spin.h"

namespace fsdpp::cuda {
namespace {

__global__ void spin_kernel(unsigned long long nanoseconds) {
  unsigned long long start = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

int launch_spin(unsigned long long nanoseconds, CUstream_st* stream) {
  spin_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fsdpp::cuda

#include <cuda_runtime.h>

#include "cuda/device_clock.cuh"
#include "cuda/spin.h"

namespace fsdpp::cuda {
namespace {

__global__ void spin_kernel(unsigned long long nanoseconds) { spin_until(nanoseconds_now() + nanoseconds); }

}  // namespace

int launch_spin(unsigned long long nanoseconds, CUstream_st* stream) {
  spin_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fsdpp::cuda

#include <cuda_runtime.h>

#include "cuda/device_clock.cuh"
#include "cuda/wire.h"

namespace fsdpp::cuda {
namespace {

__device__ unsigned long long end_on_wire(unsigned long long* free_at, unsigned long long nanoseconds) {
  const unsigned long long now = nanoseconds_now();
  unsigned long long seen = atomicAdd(free_at, 0ULL), expected = 0;
  do {
    expected = seen;
    seen = atomicCAS(free_at, expected, (expected > now ? expected : now) + nanoseconds);
  } while (seen != expected);
  return (expected > now ? expected : now) + nanoseconds;
}

__global__ void wire_kernel(WireState* state, WireLoad load) {
  WireState::Use& use = state->use[load.user];
  atomicAdd(&use.operations, 1ULL);
  atomicAdd(&use.bytes, load.bytes);
  atomicAdd(&use.nanoseconds, load.nanoseconds);
  if (state->delays != 0 && load.nanoseconds > 0) spin_until(end_on_wire(&state->free_at[load.wire], load.nanoseconds));
}

}  // namespace

int launch_wire(WireState* state, const WireLoad& load, CUstream_st* stream) {
  wire_kernel<<<1, 1, 0, stream>>>(state, load);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fsdpp::cuda

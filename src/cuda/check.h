#pragma once
#include <cuda_runtime_api.h>

#include "base/enforce.h"

namespace fsdpp::cuda {

/// Throws CudaError naming the call; clears the runtime's last-error slot so that nobody else trips over it.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  fail<CudaError>("{} failed: {} ({})", call, cudaGetErrorName(status), cudaGetErrorString(status));
}

/// For destructors: a failure is dropped (the runtime may be unloading).
inline void ignore(cudaError_t status) noexcept {
  if (status != cudaSuccess && status != cudaErrorCudartUnloading) cudaGetLastError();
}

}  // namespace fsdpp::cuda

#define FSDPP_CUDA_CHECK(call) ::fsdpp::cuda::check((call), #call)

#pragma once
#include <c10/core/DeviceGuard.h>

#include "base/enforce.h"
#include "fsdpp/cuda/stream.h"
#include "kernels/kernels.h"

/// Kernels by device: on the current stream of a CUDA device, or on the CPU before the call returns.
namespace fsdpp::optim {

/// Calls on_cuda(stream handle), which returns a CUDA error code, or on_cpu().
template <class OnCuda, class OnCpu>
void run_kernel(const char* what, c10::Device device, OnCuda&& on_cuda, OnCpu&& on_cpu) {
  if (!device.is_cuda()) return on_cpu();
  const c10::DeviceGuard guard(device);
  const int status = on_cuda(cuda::current_stream(device).handle());
  FSDPP_ENFORCE(status == 0, CudaError, "kernel {} could not be launched on {}: CUDA error {}", what, device.str(),
                status);
}

}  // namespace fsdpp::optim

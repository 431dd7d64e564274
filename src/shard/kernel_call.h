#pragma once
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>

#include "base/enforce.h"
#include "fsdpp/cuda/stream.h"
#include "kernels/kernels.h"

/// Calls of kernels/ in LibTorch's terms.
namespace fsdpp::shard {

/// Whether the kernels know the dtype.
[[nodiscard]] bool has_kernel_dtype(c10::ScalarType type) noexcept;
/// Its name there; throws ConfigError if there is none.
[[nodiscard]] kernels::DType kernel_dtype(c10::ScalarType type);

/// Queues on_cuda(stream handle), which returns a CUDA error code, on a CUDA stream; or calls on_cpu(), done at return.
template <class OnCuda, class OnCpu>
void run_kernel(const char* what, cuda::StreamView stream, OnCuda&& on_cuda, OnCpu&& on_cpu) {
  if (!stream.is_cuda()) return on_cpu();
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, stream.device_index()));
  const int status = on_cuda(stream.handle());
  FSDPP_ENFORCE(status == 0, CudaError, "kernel {} could not be launched on cuda:{}: CUDA error {}", what,
                static_cast<int>(stream.device_index()), status);
}

void run_cast(const kernels::CastArgs& args, cuda::StreamView stream);
void run_pack(const kernels::PackArgs& args, cuda::StreamView stream);

}  // namespace fsdpp::shard

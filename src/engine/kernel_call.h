#pragma once
#include "base/enforce.h"
#include "fsdpp/cuda/stream.h"
#include "kernels/kernels.h"

namespace fsdpp::engine {

inline void check_kernel(int status, const char* what) {
  FSDPP_ENFORCE(status == 0, CudaError, "kernel {} could not be launched: CUDA error {}", what, status);
}

/// On a CUDA stream: queued there. On the CPU: done at return.
inline void run_cast(const kernels::CastArgs& args, cuda::StreamView stream) {
  if (stream.is_cuda())
    check_kernel(kernels::cast(args, stream.handle()), "cast");
  else
    kernels::cast_cpu(args);
}

inline void run_pack(const kernels::PackArgs& args, cuda::StreamView stream) {
  if (stream.is_cuda())
    check_kernel(kernels::pack(args, stream.handle()), "pack");
  else
    kernels::pack_cpu(args);
}

}  // namespace fsdpp::engine

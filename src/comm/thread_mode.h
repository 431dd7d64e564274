#pragma once
#if FSDPP_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fsdpp::comm {

/// For a thread that only queries: its CUDA calls neither fail nor spoil a graph capture that another thread has open.
class ThreadCaptureMode {
 public:
#if FSDPP_CUDA
  ThreadCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~ThreadCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeThreadLocal;
#else
  ThreadCaptureMode() {}  // NOLINT: not trivial, so that an unused guard draws no warning
#endif
};

}  // namespace fsdpp::comm

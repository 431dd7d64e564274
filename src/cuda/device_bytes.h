#pragma once
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace fsdpp::cuda {

/// A few bytes of device memory of our own, zeros at first.
class DeviceBytes {
 public:
  DeviceBytes(c10::Device device, size_t bytes) {
    c10::cuda::CUDAGuard guard(device);
    FSDPP_CUDA_CHECK(cudaMalloc(&data_, bytes));
    FSDPP_CUDA_CHECK(cudaMemset(data_, 0, bytes));
    FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~DeviceBytes() { ignore(cudaFree(data_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace fsdpp::cuda

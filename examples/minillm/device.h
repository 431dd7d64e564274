#pragma once
// What the program asks of its device beyond LibTorch's tensors. Builds with and without CUDA.
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace minillm {

/// True if this build knows CUDA and the machine has a usable GPU.
[[nodiscard]] bool cuda_available();

/// Blocks until the device has finished what was queued. Nothing to do on the CPU.
void synchronize(c10::Device device);

/// CUDA: largest number of bytes that tensors held at once in LibTorch's allocator. CPU: peak resident memory of the process.
[[nodiscard]] int64_t peak_bytes(c10::Device device);

/// Dense bf16 operations per second of the GPU where its data sheet is known to us, else nothing.
[[nodiscard]] std::optional<double> peak_flops(c10::Device device);

}  // namespace minillm

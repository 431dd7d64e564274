#pragma once
#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"

/// What the rows of bench_kernels are made of.
namespace fsdpp::bench {

using namespace fsdpp::kernels;

inline void check(int error) {
  if (error != 0) throw std::runtime_error(cudaGetErrorString(static_cast<cudaError_t>(error)));
}

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t size) { check(cudaMalloc(&data_, size)); }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  char* at(size_t offset) const { return static_cast<char*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

inline constexpr int64_t kNumel = int64_t{1} << 26;  // elements of one call: 256 MiB in fp32
inline constexpr int kSlots = 4;                     // memory that the repeats take turns on
inline constexpr int64_t kChecked = (int64_t{1} << 20) + 13;  // elements compared with the CPU twin
inline constexpr int kArrays = 4;
inline constexpr size_t kArrayBytes = kNumel * 4;

/// `kArrays` arrays of kNumel fp32 (or 2·kNumel 16-bit) elements in each of kSlots slots, filled with random numbers.
class Memory {
 public:
  Memory() : bytes_(kArrayBytes * kArrays * kSlots), result_(64), scratch_(norm_scratch_bytes()) {
    const std::vector<float> numbers = random_numbers(kNumel / 64);
    for (size_t offset = 0; offset < kArrayBytes * kArrays * kSlots; offset += numbers.size() * 4) {
      check(cudaMemcpy(bytes_.at(offset), numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice));
    }
    check(cudaMemset(result_.at(0), 0, 64));
  }
  /// In [0.25, 1); each is two equal halves, so that the same bytes are good bf16 numbers too.
  static std::vector<float> random_numbers(int64_t n) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(0.25F, 1.0F);
    std::vector<float> numbers(static_cast<size_t>(n));
    for (float& x : numbers) {
      const float drawn = uniform(random);
      uint32_t bits = 0;
      std::memcpy(&bits, &drawn, sizeof bits);
      bits = (bits & 0xffff0000U) | (bits >> 16);
      std::memcpy(&x, &bits, sizeof bits);
    }
    return numbers;
  }
  void* array(int slot, int which) const {
    return bytes_.at((static_cast<size_t>(slot) * kArrays + static_cast<size_t>(which)) * kArrayBytes);
  }
  void* result() const { return result_.at(0); }
  void* scratch() const { return scratch_.at(0); }

 private:
  DeviceBytes bytes_, result_, scratch_;
};

/// One row: the kernel over n elements of the given arrays, on the GPU or by the CPU twin.
struct Row {
  std::string name;
  std::string formula;
  double bytes_per_element;
  std::function<int(void** arrays, int64_t n)> launch;
  std::function<void(void** arrays, int64_t n)> reference;  // none: not a kernel of ours, or `check` instead
  int64_t numel = kNumel;
  std::function<bool(const Memory&)> check{};  // in place of the comparison with `reference`
};

/// Kernels that compute sums over rows, or exponentials: bench_fused.cpp.
[[nodiscard]] std::vector<Row> fused_rows();

}  // namespace fsdpp::bench

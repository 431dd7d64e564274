#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

/// What tests of CUDA kernels against their CPU twins share: arrays as bytes, device memory whose surroundings must not change.
namespace fsdpp::kernels {

inline constexpr DType kAll[] = {DType::F32, DType::F64, DType::F16, DType::BF16};
inline constexpr unsigned char kPoison = 0xA5;
inline constexpr size_t kGuard = 64;  // poisoned bytes on each side

inline void expect_success(int error) { ASSERT_EQ(error, 0) << cudaGetErrorString(static_cast<cudaError_t>(error)); }

using Bytes = std::vector<unsigned char>;

/// Device memory with poisoned guards; `shift` elements off 256-byte alignment.
class DeviceArray {
 public:
  DeviceArray(DType dtype, int64_t numel, int64_t shift)
      : bytes_(static_cast<size_t>(numel) * size_of(dtype)), front_(256 + static_cast<size_t>(shift) * size_of(dtype)) {
    expect_success(cudaMalloc(&base_, front_ + bytes_ + kGuard));
    expect_success(cudaMemset(base_, kPoison, front_ + bytes_ + kGuard));
  }
  ~DeviceArray() { cudaFree(base_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void* data() const { return static_cast<char*>(base_) + front_; }
  void write(const Bytes& host) { expect_success(cudaMemcpy(data(), host.data(), bytes_, cudaMemcpyHostToDevice)); }
  Bytes read() const {
    Bytes host(bytes_);
    expect_success(cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return host;
  }
  bool guards_untouched() const {
    Bytes all(front_ + bytes_ + kGuard);
    expect_success(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i < front_ || i >= front_ + bytes_) && all[i] != kPoison) return false;
    }
    return true;
  }

 private:
  void* base_ = nullptr;
  size_t bytes_;
  size_t front_;
};

/// Normal numbers of `dtype`, made through the CPU cast.
inline Bytes random_values(DType dtype, int64_t numel, uint32_t seed, double spread = 1.0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> wide(static_cast<size_t>(numel));
  for (double& x : wide) x = normal(random);
  Bytes bytes(static_cast<size_t>(numel) * size_of(dtype));
  cast_cpu({bytes.data(), dtype, wide.data(), DType::F64, numel});
  return bytes;
}

inline std::vector<double> widen(const Bytes& bytes, DType dtype) {
  std::vector<double> wide(bytes.size() / size_of(dtype));
  cast_cpu({wide.data(), DType::F64, bytes.data(), dtype, static_cast<int64_t>(wide.size())});
  return wide;
}

/// First index at which the two differ (NaN equals NaN), or -1.
inline int64_t first_difference(const Bytes& a, const Bytes& b, DType dtype) {
  const auto x = widen(a, dtype);
  const auto y = widen(b, dtype);
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::memcmp(&a[i * size_of(dtype)], &b[i * size_of(dtype)], size_of(dtype)) != 0 &&
        !(std::isnan(x[i]) && std::isnan(y[i]))) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

inline std::string describe(DType a, DType b, int64_t n, int64_t shift) {
  return "dtypes " + std::to_string(static_cast<int>(a)) + "," + std::to_string(static_cast<int>(b)) + " n " + std::to_string(n) +
         " shift " + std::to_string(shift);
}

}  // namespace fsdpp::kernels

#include "device.h"

#include <sys/resource.h>

#ifdef MINILLM_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <string_view>
#endif

namespace minillm {

#ifdef MINILLM_CUDA
bool cuda_available() {
  int count = 0;
  const bool available = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  return available;
}

void synchronize(c10::Device device) {
  if (device.is_cuda()) C10_CUDA_CHECK(cudaDeviceSynchronize());
}

std::optional<double> peak_flops(c10::Device device) {
  cudaDeviceProp properties{};
  if (!device.is_cuda() || cudaGetDeviceProperties(&properties, device.index()) != cudaSuccess) return std::nullopt;
  constexpr double kHopperSxmDenseBf16 = 989e12;  // H100 SXM and H200; the PCIe and NVL cards are slower
  const std::string_view name = properties.name;
  auto has = [&](const char* part) { return name.find(part) != name.npos; };
  const bool known = (has("H100") || has("H200")) && !has("PCIe") && !has("NVL");
  return known ? std::optional(kHopperSxmDenseBf16) : std::nullopt;
}
#else
bool cuda_available() { return false; }
void synchronize(c10::Device) {}
std::optional<double> peak_flops(c10::Device) { return std::nullopt; }
#endif

int64_t peak_bytes(c10::Device device) {
#ifdef MINILLM_CUDA
  if (device.is_cuda()) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
  }
#endif
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace minillm

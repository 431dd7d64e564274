#include "comm/device.h"

#include "base/enforce.h"
#include "base/env.h"
#if FSDPP_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace fsdpp::comm {

#if FSDPP_CUDA
namespace {

std::string no_such_gpu(int64_t index, int count, const RankEnv& env, int64_t ranks_per_gpu) {
  return fmt::format(
      "World: rank {} (local rank {}{}) expected GPU {}, but this host shows {} to it. Try: fewer ranks on this host, "
      "nvidia-smi -L and CUDA_VISIBLE_DEVICES, or fsdpp-run --ranks-per-gpu for tests",
      env.rank, env.local_rank, ranks_per_gpu > 1 ? fmt::format(", FSDPP_RANKS_PER_GPU={}", ranks_per_gpu) : "", index,
      count == 0 ? "none" : std::to_string(count));
}

}  // namespace

DeviceChoice choose_device(c10::DeviceType kind, const RankEnv& env) {
  if (kind == c10::kCPU) return {};
  const int64_t ranks_per_gpu = env::get_int("FSDPP_RANKS_PER_GPU", 1, 4096).value_or(1);
  const int64_t index = env.local_rank / ranks_per_gpu;
  const int count = c10::cuda::device_count();
  if (index >= count) return {c10::Device(c10::kCPU), no_such_gpu(index, count, env, ranks_per_gpu)};
  return {c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)), {}};
}

void use_device(c10::Device device) {
  if (!device.is_cuda()) return;
  env::set_default("NCCL_NVLS_ENABLE", "0");  // no multicast: gathers and reduce-scatters lose nothing by it
  env::set_default("NCCL_LAUNCH_ORDER_IMPLICIT",
                   "1");  // two communicators at once must start in the same order on all GPUs
  c10::cuda::set_device(device.index());
}
#else
DeviceChoice choose_device(c10::DeviceType kind, const RankEnv&) {
  if (kind == c10::kCPU) return {};
  return {c10::Device(c10::kCPU),
          "World: a CUDA device was asked for, but this fsdpp was built without CUDA. Try: configure with "
          "-DFSDPP_WITH_CUDA=ON"};
}

void use_device(c10::Device) {}
#endif

}  // namespace fsdpp::comm

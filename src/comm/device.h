#pragma once
#include <c10/core/Device.h>

#include <string>

#include "fsdpp/base/rank_env.h"

namespace fsdpp::comm {

struct DeviceChoice {
  c10::Device device{c10::kCPU};
  std::string problem;  ///< not empty: the device is not there, and why
};

/// The device of this rank; looks but touches nothing.
[[nodiscard]] DeviceChoice choose_device(c10::DeviceType kind, const RankEnv& env);
/// Makes it the process's current device (CUDA) and sets NCCL's defaults. No-op for the CPU.
void use_device(c10::Device device);

}  // namespace fsdpp::comm

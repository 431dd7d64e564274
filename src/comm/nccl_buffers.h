#pragma once
#include <memory>
#include <span>

#include "comm/nccl_core.h"
#include "comm/window_support.h"

namespace fsdpp::comm {

/// What this rank knows before it has heard of the others.
[[nodiscard]] WindowFacts own_window_facts(c10::Device device);
/// Index of the first member of this host whose GPU `device` can't access, or -1. `facts` by member, `rank` this one's index.
[[nodiscard]] int64_t first_unreachable(std::span<const WindowFacts> facts, int rank, c10::Device device);
/// Memory that `core` can register (NcclCore::register_window), not registered yet. When it is freed the registration ends first; memory
/// that a hanging operation may use is left. Without data if none is left.
[[nodiscard]] Allocation window_memory(int64_t bytes, c10::Device device, std::shared_ptr<NcclCore> core);

}  // namespace fsdpp::comm

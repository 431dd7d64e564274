#include "comm/collective_use.h"

#include <atomic>

namespace fsdpp::comm {
namespace {

std::atomic<int> uses{0};

}  // namespace

bool has_collectives() noexcept { return uses.load(std::memory_order_relaxed) > 0; }
CollectiveUse::CollectiveUse() noexcept { uses.fetch_add(1, std::memory_order_relaxed); }
CollectiveUse::~CollectiveUse() { uses.fetch_sub(1, std::memory_order_relaxed); }

}  // namespace fsdpp::comm

#pragma once

/// Whether kernels of collectives may hold some of the GPU's multiprocessors while others compute. Products choose
/// their schedule by it: work handed out block by block, not in equal parts to all multiprocessors at once, of which
/// some would begin late.
namespace fsdpp::comm {

/// NCCL communicators of fsdpp with several ranks are alive in this process.
[[nodiscard]] bool has_collectives() noexcept;

/// Counts as one while it lives.
class CollectiveUse {
 public:
  CollectiveUse() noexcept;
  ~CollectiveUse();
  CollectiveUse(const CollectiveUse&) = delete;
  CollectiveUse& operator=(const CollectiveUse&) = delete;
};

}  // namespace fsdpp::comm

#pragma once
#include <functional>

namespace fsdpp::comm {
class Mesh;
}

namespace fsdpp::dcp {

/// Runs `work` on this rank; then all ranks of the mesh's shard axis learn whether it threw anywhere. If so every rank throws
/// CheckpointError with the message of the lowest rank that failed. Collective; blocks the host. Without a mesh: just `work()`.
void run_and_agree(const comm::Mesh* mesh, const std::function<void()>& work);

}  // namespace fsdpp::dcp

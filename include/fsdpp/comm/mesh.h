#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// How a mesh communicates. Equal on all ranks. Each is overridden by an environment variable.
struct MeshOptions {
  /// Gathered and gradient buffers come from Communicator::allocate: registered with NCCL, reserved before the first gather. They
  /// are not part of what LibTorch's allocator counts. Gathers are in place then (a shard that needs no cast is copied first).
  /// A failure may have to end the process (see there). With gradients accumulated without synchronisation all ranks must come
  /// to the same units in the same order. `FSDPP_SYMMETRIC_BUFFERS`.
  bool symmetric_buffers = false;
  /// Gathers by copy engines; implies symmetric_buffers. `FSDPP_COPY_ENGINE_GATHERS`.
  bool copy_engine_gathers = false;
  /// CommunicatorOptions::max_ctas of its communicators. `FSDPP_MAX_CTAS`.
  int max_ctas = 0;
};

/// Ranks as replicate × shard; rank = replicate_rank · shard_size + shard_rank. 1-D: replicate_size() == 1.
///
/// Owns this rank's communicators, one for each purpose, so that a gather never queues behind a reduction on the wire.
class FSDPP_API Mesh {
 public:
  /// All ranks of the world shard. Collective (makes communicators).
  [[nodiscard]] static std::shared_ptr<Mesh> shard(std::shared_ptr<World> world, const std::string& name = "default",
                                                   const MeshOptions& options = {});

  /// Hybrid sharding: `replicate_size` groups of world.size() / replicate_size ranks; each group holds the whole model, sharded
  /// among its ranks. ConfigError unless replicate_size divides the world. Collective.
  [[nodiscard]] static std::shared_ptr<Mesh> hybrid(std::shared_ptr<World> world, int replicate_size, const std::string& name = "default",
                                                    const MeshOptions& options = {});

  [[nodiscard]] World& world() const noexcept { return *world_; }
  [[nodiscard]] c10::Device device() const noexcept { return world_->device(); }
  [[nodiscard]] int shard_size() const noexcept { return shard_size_; }
  [[nodiscard]] int shard_rank() const noexcept { return shard_rank_; }
  [[nodiscard]] int replicate_size() const noexcept { return replicate_size_; }
  [[nodiscard]] int replicate_rank() const noexcept { return replicate_rank_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// With what the environment changed.
  [[nodiscard]] const MeshOptions& options() const noexcept { return options_; }

  /// All-gathers of parameters, among the shard axis.
  [[nodiscard]] Communicator& gather_comm() const noexcept { return *gather_; }
  /// Reduce-scatters of gradients, among the shard axis.
  [[nodiscard]] Communicator& reduce_comm() const noexcept { return *reduce_; }
  /// All-reduces of sharded gradients, among the ranks that hold the same shard (replicate axis).
  [[nodiscard]] Communicator& replicate_comm() const noexcept { return *replicate_; }
  /// All-gathers among `size` neighbours of the shard axis (shard ranks k·size … k·size + size − 1), for resharding to a smaller
  /// group after forward. Made at first use: collective then. ConfigError unless `size` divides the shard axis.
  [[nodiscard]] Communicator& subgroup_comm(int size);

 private:
  Mesh() = default;
  [[nodiscard]] std::vector<int> shard_ranks(int first, int count) const;
  std::shared_ptr<World> world_;
  std::string name_;
  MeshOptions options_;
  int shard_size_ = 1, shard_rank_ = 0, replicate_size_ = 1, replicate_rank_ = 0;
  std::shared_ptr<Communicator> gather_, reduce_, replicate_;
  std::map<int, std::shared_ptr<Communicator>> subgroups_;  ///< by size
};

}  // namespace fsdpp::comm

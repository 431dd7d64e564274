#include "fsdpp/comm/mesh.h"

#include "base/enforce.h"
#include "base/env.h"

namespace fsdpp::comm {
namespace {

MeshOptions with_environment(MeshOptions options) {
  options.copy_engine_gathers = env::get_flag("FSDPP_COPY_ENGINE_GATHERS", options.copy_engine_gathers);
  options.symmetric_buffers = env::get_flag("FSDPP_SYMMETRIC_BUFFERS", options.symmetric_buffers) || options.copy_engine_gathers;
  if (auto limit = env::get_int("FSDPP_MAX_CTAS", 0, 64)) options.max_ctas = static_cast<int>(*limit);
  return options;
}

}  // namespace

std::shared_ptr<Mesh> Mesh::shard(std::shared_ptr<World> world, const std::string& name, const MeshOptions& options) {
  return hybrid(std::move(world), 1, name, options);
}

std::shared_ptr<Mesh> Mesh::hybrid(std::shared_ptr<World> world, int replicate_size, const std::string& name, const MeshOptions& options) {
  FSDPP_ENFORCE(replicate_size >= 1 && world->size() % replicate_size == 0, ConfigError,
                "mesh '{}': expected a replicate axis that divides the world of {} ranks, got {}", name, world->size(), replicate_size);
  std::shared_ptr<Mesh> mesh(new Mesh());
  mesh->name_ = name;
  mesh->options_ = with_environment(options);
  mesh->replicate_size_ = replicate_size;
  mesh->shard_size_ = world->size() / replicate_size;
  mesh->replicate_rank_ = world->rank() / mesh->shard_size_;
  mesh->shard_rank_ = world->rank() % mesh->shard_size_;
  mesh->world_ = std::move(world);
  auto shard_axis = mesh->shard_ranks(0, mesh->shard_size_);
  std::vector<int> replicate_axis;
  for (int r = 0; r < replicate_size; ++r) replicate_axis.push_back(r * mesh->shard_size_ + mesh->shard_rank_);
  const CommunicatorOptions plain{.max_ctas = mesh->options_.max_ctas};
  auto gathering = plain;
  gathering.copy_engine = mesh->options_.copy_engine_gathers;
  mesh->gather_ = mesh->world_->make_communicator(name + ".gather", shard_axis, gathering);
  mesh->reduce_ = mesh->world_->make_communicator(name + ".reduce", shard_axis, plain);
  mesh->replicate_ = mesh->world_->make_communicator(name + ".replicate", replicate_axis, plain);
  return mesh;
}

// World ranks of this replica group's shard ranks first … first + count − 1.
std::vector<int> Mesh::shard_ranks(int first, int count) const {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(replicate_rank_ * shard_size_ + first + i);
  return ranks;
}

Communicator& Mesh::subgroup_comm(int size) {
  FSDPP_ENFORCE(size >= 1 && shard_size_ % size == 0, ConfigError,
                "mesh '{}': expected a group size that divides the shard axis of {} ranks, got {}", name_, shard_size_, size);
  auto& comm = subgroups_[size];
  if (!comm) comm = world_->make_communicator(name_ + ".group" + std::to_string(size), shard_ranks(shard_rank_ / size * size, size),
                                           {.max_ctas = options_.max_ctas});
  return *comm;
}

}  // namespace fsdpp::comm

#include "fsdpp/comm/mesh.h"

#include "base/enforce.h"

namespace fsdpp::comm {

std::shared_ptr<Mesh> Mesh::shard(std::shared_ptr<World> world, const std::string& name) { return hybrid(std::move(world), 1, name); }

std::shared_ptr<Mesh> Mesh::hybrid(std::shared_ptr<World> world, int replicate_size, const std::string& name) {
  FSDPP_ENFORCE(replicate_size >= 1 && world->size() % replicate_size == 0, ConfigError,
                "mesh '{}': expected a replicate axis that divides the world of {} ranks, got {}", name, world->size(), replicate_size);
  std::shared_ptr<Mesh> mesh(new Mesh());
  mesh->name_ = name;
  mesh->replicate_size_ = replicate_size;
  mesh->shard_size_ = world->size() / replicate_size;
  mesh->replicate_rank_ = world->rank() / mesh->shard_size_;
  mesh->shard_rank_ = world->rank() % mesh->shard_size_;
  mesh->world_ = std::move(world);
  auto shard_axis = mesh->shard_ranks(0, mesh->shard_size_);
  std::vector<int> replicate_axis;
  for (int r = 0; r < replicate_size; ++r) replicate_axis.push_back(r * mesh->shard_size_ + mesh->shard_rank_);
  mesh->gather_ = mesh->world_->make_communicator(name + ".gather", shard_axis);
  mesh->reduce_ = mesh->world_->make_communicator(name + ".reduce", shard_axis);
  mesh->replicate_ = mesh->world_->make_communicator(name + ".replicate", replicate_axis);
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
  if (!comm) comm = world_->make_communicator(name_ + ".group" + std::to_string(size), shard_ranks(shard_rank_ / size * size, size));
  return *comm;
}

}  // namespace fsdpp::comm

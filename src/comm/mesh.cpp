#include "fsdpp/comm/mesh.h"

namespace fsdpp::comm {

std::shared_ptr<Mesh> Mesh::shard(std::shared_ptr<World> world, const std::string& name) {
  std::shared_ptr<Mesh> mesh(new Mesh());
  mesh->shard_size_ = world->size();
  mesh->shard_rank_ = world->rank();
  mesh->name_ = name;
  mesh->gather_ = world->make_communicator(name + ".gather");
  mesh->reduce_ = world->make_communicator(name + ".reduce");
  mesh->world_ = std::move(world);
  return mesh;
}

}  // namespace fsdpp::comm

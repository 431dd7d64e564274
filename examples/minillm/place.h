#pragma once
#include <c10/core/Device.h>

#include <memory>

#include "fsdpp/comm/mesh.h"

namespace minillm {

/// Where a process trains: alone, or as one rank of a mesh.
struct Place {
  std::shared_ptr<fsdpp::comm::Mesh> mesh;  ///< null: unsharded, in one process
  c10::Device device = c10::kCPU;
  int rank = 0;
  int world_size = 1;
};

}  // namespace minillm

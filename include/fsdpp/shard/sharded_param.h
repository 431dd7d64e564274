#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/mesh.h"
#include "fsdpp/shard/plan.h"

namespace fsdpp::shard {

/// DTensor-style metadata of one sharded parameter, as this rank sees it. A plain value; stays right while sharded.
struct FSDPP_API ShardedParam {
  std::string name;                                ///< first fully qualified name, e.g. "layers.0.attn.in_proj_weight"
  std::vector<int64_t> global_sizes;               ///< shape as the user built it
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< original dtype; that of the local shard
  at::Tensor handle;                               ///< the parameter itself; between steps its data is the local shard
  std::shared_ptr<comm::Mesh> mesh;
  Cut cut = Cut::Rows;
  int64_t row_numel = 1;      ///< elements of one row of dim 0
  std::vector<Range> ranges;  ///< by shard rank: its elements in row-major order of the global tensor
  int64_t slice_offset = 0;   ///< where the local shard starts in this rank's shard buffer, in elements
  size_t buffer = 0;          ///< which shard buffer of the unit

  [[nodiscard]] Range local() const { return ranges[static_cast<size_t>(mesh->shard_rank())]; }
  [[nodiscard]] int64_t numel() const;
  /// Shape of the local shard: [rows, …] for Cut::Rows (a scalar stays []), [elements] for Cut::Elements; dim 0 is 0
  /// where this rank owns nothing. Rows without elements (row_numel 0) are every rank's.
  [[nodiscard]] std::vector<int64_t> local_sizes() const;
  /// "Ragged(dim=0, rows=[3,3,2])" or "Ragged(elements=[…])".
  [[nodiscard]] std::string placement() const;
};

/// Joins the ranks' parts of `local` (shaped like the local shard, any dtype, on the mesh's device or offloaded to host
/// memory) into the global tensor on every rank: a new tensor of the dtype of `local` on the mesh's device, without
/// autograd history, that shares no memory with it.
/// Collective over the mesh's shard axis (on gather_comm(); nothing on the wire at shard size 1); blocks the host on
/// CPU, queues on the current stream on CUDA. Throws UsageError for another shape or device.
[[nodiscard]] FSDPP_API at::Tensor full_tensor(const ShardedParam& param, const at::Tensor& local);

/// The part of `full` (global shape, any device and dtype) that this rank owns: a new contiguous tensor shaped like the
/// local shard, on the device and in the dtype of `full`. No communication. Throws UsageError for another shape.
[[nodiscard]] FSDPP_API at::Tensor local_part(const ShardedParam& param, const at::Tensor& full);

}  // namespace fsdpp::shard

#include "fsdpp/shard/sharded_param.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/enforce.h"
#include "fsdpp/cuda/stream.h"
#include "shard/local_shape.h"

namespace fsdpp::shard {
namespace {

int64_t product(const std::vector<int64_t>& sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}

int64_t unit_of(const ShardedParam& param) {
  return param.cut == Cut::Rows ? std::max<int64_t>(param.row_numel, 1) : 1;
}

/// The owners' ranges of `full` (contiguous, one for each shard rank) to everybody, as bytes: any dtype will do.
void broadcast_ranges(const ShardedParam& param, const at::Tensor& full) {
  const cuda::StreamView stream = cuda::current_stream(full.device());
  const auto width = static_cast<int64_t>(full.element_size());
  auto* bytes = static_cast<char*>(full.mutable_data_ptr());
  const std::string label = "full_tensor " + param.name;
  comm::Communicator& comm = param.mesh->gather_comm();
  comm::Group group(comm);
  for (size_t owner = 0; owner < param.ranges.size(); ++owner) {
    const Range& range = param.ranges[owner];
    if (range.size() == 0) continue;
    (void)comm.broadcast({bytes + range.begin * width, range.size() * width, c10::ScalarType::Byte},
                         static_cast<int>(owner), stream, {label});
  }
  group.finish().wait(stream);
}

}  // namespace

int64_t ShardedParam::numel() const { return product(global_sizes); }

std::vector<int64_t> ShardedParam::local_sizes() const { return shard::local_sizes(global_sizes, cut, local()); }

std::string ShardedParam::placement() const {
  std::vector<int64_t> counts;
  for (const Range& range : ranges) counts.push_back(range.size() / unit_of(*this));
  return fmt::format("Ragged({}=[{}])", cut == Cut::Rows ? "dim=0, rows" : "elements", fmt::join(counts, ","));
}

at::Tensor full_tensor(const ShardedParam& param, const at::Tensor& local) {
  FSDPP_ENFORCE(local.defined(), UsageError, "full_tensor({}): expected a tensor, got an undefined one", param.name);
  const std::vector<int64_t> expected = param.local_sizes();
  FSDPP_ENFORCE(local.sizes() == at::IntArrayRef(expected), UsageError,
                "full_tensor({}): expected the local shard's shape [{}], got [{}]. Try: reshard() first", param.name,
                fmt::join(expected, ", "), fmt::join(local.sizes(), ", "));
  FSDPP_ENFORCE(local.is_cpu() || local.device() == param.mesh->device(), UsageError,
                "full_tensor({}): expected a tensor on {} or in host memory, got one on {}", param.name,
                param.mesh->device().str(), local.device().str());
  const at::Tensor data = local.detach().to(param.mesh->device());
  at::Tensor full = at::empty(param.global_sizes, data.options());
  const Range range = param.local();
  if (range.size() > 0) full.view({-1}).narrow(0, range.begin, range.size()).copy_(data.reshape({-1}));
  if (param.mesh->shard_size() > 1 && param.numel() > 0) broadcast_ranges(param, full);
  return full;
}

at::Tensor local_part(const ShardedParam& param, const at::Tensor& full) {
  FSDPP_ENFORCE(full.defined() && full.sizes() == at::IntArrayRef(param.global_sizes), UsageError,
                "local_part({}): expected the global shape [{}], got [{}]", param.name,
                fmt::join(param.global_sizes, ", "),
                full.defined() ? fmt::format("{}", fmt::join(full.sizes(), ", ")) : "undefined");
  const Range range = param.local();
  const at::Tensor flat = full.detach().contiguous().view({-1});
  return flat.narrow(0, range.begin, range.size()).clone().view(param.local_sizes());
}

}  // namespace fsdpp::shard

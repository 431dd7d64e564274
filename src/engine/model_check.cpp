#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <sstream>

#include "base/enforce.h"
#include "base/fnv.h"
#include "engine/comm_context.h"
#include "engine/first_difference.h"

namespace fsdpp::engine {
namespace {

at::Tensor gather_fingerprints(CommContext& context, int64_t own) {
  auto& mesh = context.mesh();
  auto options = at::TensorOptions(mesh.device()).dtype(at::kLong);
  auto mine = at::full({1}, own, options);
  auto all = at::empty({mesh.shard_size()}, options);
  auto stream = context.compute_stream();
  auto ticket = mesh.gather_comm().all_gather({all.mutable_data_ptr(), mesh.shard_size(), at::kLong},
                                              {mine.const_data_ptr(), 1, at::kLong}, stream, {.label = "model check"});
  ticket.wait(stream);
  return all.cpu();
}

}  // namespace

Difference first_difference(const std::string& left, const std::string& right) {
  std::istringstream a(left), b(right);
  Difference d;
  for (;; ++d.line) {
    bool more_a = static_cast<bool>(std::getline(a, d.left)), more_b = static_cast<bool>(std::getline(b, d.right));
    if (!more_a) d.left = "nothing";
    if (!more_b) d.right = "nothing";
    if (d.left != d.right || (!more_a && !more_b)) return d;
  }
}

// First among the replicas of each shard rank, then within each group from its rank 0.
void broadcast_from_rank0(comm::Mesh& mesh, const std::vector<at::Tensor>& tensors) {
  auto stream = cuda::current_stream(mesh.device());
  for (auto* comm : {&mesh.replicate_comm(), &mesh.gather_comm()}) {
    if (comm->size() == 1) continue;
    for (auto& t : tensors) {
      if (t.numel() == 0) continue;
      auto dense = t.to(mesh.device()).contiguous();
      comm::Buffer bytes{dense.mutable_data_ptr(), static_cast<int64_t>(dense.nbytes()), c10::ScalarType::Byte};
      comm->broadcast(bytes, 0, stream, {.label = "weights of rank 0"}).wait(stream);
      if (!dense.is_same(t)) t.copy_(dense);
    }
  }
}

void keep_largest(comm::Mesh& mesh, const at::Tensor& numbers) {
  auto stream = cuda::current_stream(mesh.device());
  comm::Buffer buffer{numbers.mutable_data_ptr(), numbers.numel(), c10::ScalarType::Long};
  for (auto* comm : {&mesh.replicate_comm(), &mesh.gather_comm()})
    if (comm->size() > 1) comm->all_reduce(buffer, buffer, comm::ReduceOp::Max, stream, {.label = "largest values"}).wait(stream);
}

void check_same_model(CommContext& context, const std::string& description) {
  if (!context.on_wire()) return;
  auto& mesh = context.mesh();
  auto all = gather_fingerprints(context, static_cast<int64_t>(fnv1a(description)));
  const auto* prints = all.const_data_ptr<int64_t>();
  int other = 0;
  while (other < mesh.shard_size() && prints[other] == prints[0]) ++other;
  if (other == mesh.shard_size()) return;
  auto key = [&, n = context.next_model_check()](int rank) {
    return fmt::format("model/{}/replica{}/{}/{}", mesh.name(), mesh.replicate_rank(), n, rank);
  };
  mesh.world().store().set(key(mesh.shard_rank()), description);
  auto timeout = std::chrono::seconds(30);
  auto [line, first, second] = first_difference(mesh.world().store().get(key(0), timeout), mesh.world().store().get(key(other), timeout));
  fail<UsageError>("the model is not the same on all ranks: rank 0 has [{}], rank {} has [{}]. Try: build the same modules, in the "
                   "same order and with the same options, on every rank.", first, other, second);
}

}  // namespace fsdpp::engine

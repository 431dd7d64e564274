#include "checkpoint/agree.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <optional>
#include <string>

#include "base/enforce.h"
#include "fsdpp/comm/mesh.h"

namespace fsdpp::dcp {
namespace {

comm::Buffer buffer_of(const at::Tensor& t) { return {t.data_ptr(), t.numel(), t.scalar_type()}; }

/// The smallest of the ranks' numbers.
int64_t smallest(const comm::Mesh& mesh, int64_t mine) {
  auto t = at::full({1}, mine, at::TensorOptions().dtype(at::kLong).device(mesh.device()));
  const auto stream = cuda::current_stream(mesh.device());
  for (auto* comm : {&mesh.gather_comm(), &mesh.replicate_comm()})
    comm->all_reduce(buffer_of(t), buffer_of(t), comm::ReduceOp::Min, stream, {"checkpoint status", {}}).wait(stream);
  return t.item<int64_t>();
}

/// The text of the communicator's rank `root`, on all of its ranks. `length` travels first.
std::string broadcast_text(const comm::Mesh& mesh, comm::Communicator& comm, const std::string& mine, int root) {
  const auto stream = cuda::current_stream(mesh.device());
  auto length = at::full({1}, static_cast<int64_t>(mine.size()), at::TensorOptions().dtype(at::kLong).device(mesh.device()));
  comm.broadcast(buffer_of(length), root, stream, {"checkpoint error length", {}}).wait(stream);
  std::string text(static_cast<size_t>(length.item<int64_t>()), '\0');
  if (comm.rank() == root) text = mine;
  auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  bytes = bytes.to(mesh.device());
  comm.broadcast(buffer_of(bytes), root, stream, {"checkpoint error", {}}).wait(stream);
  bytes = bytes.cpu();
  std::memcpy(text.data(), bytes.data_ptr(), text.size());
  return text;
}

}  // namespace

void run_and_agree(const comm::Mesh* mesh, const std::function<void()>& work) {
  if (mesh == nullptr || mesh->shard_size() * mesh->replicate_size() == 1) return work();
  std::optional<std::string> error;
  try {
    work();
  } catch (const std::exception& e) {
    error = e.what();
  }
  const int shards = mesh->shard_size(), size = shards * mesh->replicate_size();
  const auto first = static_cast<int>(smallest(*mesh, error ? mesh->replicate_rank() * shards + mesh->shard_rank() : size));
  if (first == size) return;
  auto text = broadcast_text(*mesh, mesh->gather_comm(), error.value_or(""), first % shards);
  text = broadcast_text(*mesh, mesh->replicate_comm(), text, first / shards);
  if (error) throw CheckpointError(*error);
  throw CheckpointError(rank_prefix() + "another rank failed: " + text);
}

}  // namespace fsdpp::dcp

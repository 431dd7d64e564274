#include <cstring>

#include "comm/local_hub.h"
#include "comm/reduce.h"

namespace fsdpp::comm {
namespace {

using Ops = std::vector<std::optional<Op>>;

char* out_at(const Op& op, size_t bytes) { return static_cast<char*>(op.out) + bytes; }
const char* in_at(const Op& op, size_t bytes) { return static_cast<const char*>(op.in) + bytes; }

void move_bytes(char* to, const char* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

std::vector<const void*> inputs_at(const Ops& ops, size_t bytes) {
  std::vector<const void*> inputs;
  for (const auto& op : ops) inputs.push_back(in_at(*op, bytes));
  return inputs;
}

void all_gather(const Ops& ops) {
  const size_t part = ops[0]->in_bytes();
  for (const auto& to : ops)
    for (size_t r = 0; r < ops.size(); ++r) move_bytes(out_at(*to, r * part), in_at(*ops[r], 0), part);
}

void all_to_all(const Ops& ops) {
  const size_t part = ops[0]->in_bytes() / ops.size();
  for (size_t to = 0; to < ops.size(); ++to)
    for (size_t from = 0; from < ops.size(); ++from)
      move_bytes(out_at(*ops[to], from * part), in_at(*ops[from], to * part), part);
}

void reduce_scatter(const Ops& ops) {
  const auto n = static_cast<int64_t>(ops.size());
  const int64_t count = ops[0]->sig.count / n;
  const size_t part = ops[0]->in_bytes() / ops.size();
  for (size_t r = 0; r < ops.size(); ++r)
    reduce_ordered(ops[r]->out, inputs_at(ops, r * part), count, ops[0]->sig.dtype, ops[0]->sig.reduce);
}

void all_reduce(const Ops& ops) {
  const size_t bytes = ops[0]->in_bytes();
  std::vector<char> sum(bytes);
  reduce_ordered(sum.data(), inputs_at(ops, 0), ops[0]->sig.count, ops[0]->sig.dtype, ops[0]->sig.reduce);
  for (const auto& op : ops) move_bytes(out_at(*op, 0), sum.data(), bytes);
}

void broadcast(const Ops& ops) {
  const Op& root = *ops[static_cast<size_t>(ops[0]->sig.root)];
  for (const auto& op : ops) move_bytes(out_at(*op, 0), in_at(root, 0), op->in_bytes());
}

}  // namespace

void execute_local(const Ops& ops) {
  switch (ops[0]->sig.kind) {
    case OpKind::AllGather:
      return all_gather(ops);
    case OpKind::ReduceScatter:
      return reduce_scatter(ops);
    case OpKind::AllReduce:
      return all_reduce(ops);
    case OpKind::Broadcast:
      return broadcast(ops);
    case OpKind::AllToAll:
      return all_to_all(ops);
    case OpKind::Barrier:
      return;
  }
}

}  // namespace fsdpp::comm

#include "comm/op.h"

#include <fmt/format.h>

namespace fsdpp::comm {
namespace {

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Min:
      return "min";
  }
  return "?";
}

}  // namespace

std::string_view name_of(OpKind kind) {
  switch (kind) {
    case OpKind::AllGather:
      return "all_gather";
    case OpKind::ReduceScatter:
      return "reduce_scatter";
    case OpKind::AllReduce:
      return "all_reduce";
    case OpKind::Broadcast:
      return "broadcast";
    case OpKind::AllToAll:
      return "all_to_all";
    case OpKind::Barrier:
      return "barrier";
  }
  return "?";
}

bool reduces(OpKind kind) { return kind == OpKind::ReduceScatter || kind == OpKind::AllReduce; }

std::string describe(const Signature& sig, std::string_view label) {
  std::string text(name_of(sig.kind));
  if (reduces(sig.kind)) text += fmt::format("({})", name_of(sig.reduce));
  if (sig.kind == OpKind::Broadcast) text += fmt::format("(root {})", sig.root);
  if (sig.kind != OpKind::Barrier) text += fmt::format(" of {} {}", sig.count, c10::toString(sig.dtype));
  if (!label.empty()) text += fmt::format(" '{}'", label);
  return text;
}

std::string short_name(const Op& op) {
  std::string text = fmt::format("{} #{}", name_of(op.sig.kind), op.sequence);
  if (!op.label.empty()) text += fmt::format(" '{}'", op.label);
  return text;
}

bool labels_agree(std::string_view a, std::string_view b) { return a.empty() || b.empty() || a == b; }

std::string mismatch_text(const std::string& comm, uint64_t sequence, int rank_a, const std::string& a, int rank_b,
                          const std::string& b) {
  return fmt::format(
      "communicator '{}', operation #{}: expected the same call on every rank, got {} on rank {} but {} on rank {}. "
      "Try: look for a branch that depends on the rank before this call.",
      comm, sequence, a, rank_a, b, rank_b);
}

}  // namespace fsdpp::comm

#include "comm/host_algorithms.h"

#include <cstring>

#include "comm/reduce.h"

namespace fsdpp::comm {
namespace {

constexpr size_t kSmall = 16 << 10;  // all_reduce: below this one exchange of everything is faster than two of parts

char* at(void* base, size_t bytes) { return static_cast<char*>(base) + bytes; }
const char* at(const void* base, size_t bytes) { return static_cast<const char*>(base) + bytes; }

void move_bytes(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

/// Cuts `count` elements into `parts` that differ by one at most.
struct Cut {
  int64_t count, parts;
  [[nodiscard]] int64_t begin(size_t part) const {
    const auto p = static_cast<int64_t>(part);
    return p * (count / parts) + std::min(p, count % parts);
  }
  [[nodiscard]] int64_t size(size_t part) const { return begin(part + 1) - begin(part); }
};

}  // namespace

char* HostAlgorithms::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();
    scratch_.reset(new char[bytes]);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

void HostAlgorithms::run(const Op& op) {
  switch (op.sig.kind) {
    case OpKind::AllGather:
      return all_gather(op);
    case OpKind::ReduceScatter:
      return reduce_scatter(op);
    case OpKind::AllReduce:
      return op.in_bytes() <= kSmall ? all_reduce_small(op) : all_reduce(op);
    case OpKind::Broadcast:
      return broadcast(op);
    case OpKind::AllToAll:
      return all_to_all(op);
    case OpKind::Barrier:
      return exchange(op, 0, transfers());
  }
}

void HostAlgorithms::all_gather(const Op& op) {
  const size_t part = op.in_bytes();
  auto moves = transfers();
  for (size_t r = 0; r < size_; ++r)
    if (r != rank_) moves[r] = {op.in, part, at(op.out, r * part), part};
  move_bytes(at(op.out, rank_ * part), op.in, part);
  exchange(op, 0, moves);
}

void HostAlgorithms::all_to_all(const Op& op) {
  const size_t part = op.in_bytes() / size_;
  auto moves = transfers();
  for (size_t r = 0; r < size_; ++r)
    if (r != rank_) moves[r] = {at(op.in, r * part), part, at(op.out, r * part), part};
  move_bytes(at(op.out, rank_ * part), at(op.in, rank_ * part), part);
  exchange(op, 0, moves);
}

void HostAlgorithms::broadcast(const Op& op) {
  const auto root = static_cast<size_t>(op.sig.root);
  const size_t bytes = op.in_bytes();
  auto moves = transfers();
  if (rank_ != root) {
    moves[root] = {nullptr, 0, op.out, bytes};
  } else {
    for (size_t r = 0; r < size_; ++r)
      if (r != root) moves[r] = {op.in, bytes, nullptr, 0};
  }
  exchange(op, 0, moves);
}

void HostAlgorithms::reduce_scatter(const Op& op) {
  const size_t part = op.in_bytes() / size_;
  char* received = scratch(part * size_);
  auto moves = transfers();
  std::vector<const void*> inputs(size_);
  for (size_t r = 0; r < size_; ++r) {
    inputs[r] = r == rank_ ? at(op.in, r * part) : received + r * part;
    if (r != rank_) moves[r] = {at(op.in, r * part), part, received + r * part, part};
  }
  exchange(op, 0, moves);
  reduce_ordered(op.out, inputs, op.sig.count / static_cast<int64_t>(size_), op.sig.dtype, op.sig.reduce);
}

void HostAlgorithms::all_reduce_small(const Op& op) {
  const size_t bytes = op.in_bytes();
  char* received = scratch(bytes * size_);
  auto moves = transfers();
  std::vector<const void*> inputs(size_);
  for (size_t r = 0; r < size_; ++r) {
    inputs[r] = r == rank_ ? op.in : received + r * bytes;
    if (r != rank_) moves[r] = {op.in, bytes, received + r * bytes, bytes};
  }
  exchange(op, 0, moves);
  reduce_ordered(op.out, inputs, op.sig.count, op.sig.dtype, op.sig.reduce);
}

void HostAlgorithms::all_reduce(const Op& op) {
  const size_t element = c10::elementSize(op.sig.dtype);
  const Cut cut{op.sig.count, static_cast<int64_t>(size_)};
  auto offset = [&](size_t r) { return static_cast<size_t>(cut.begin(r)) * element; };
  auto bytes = [&](size_t r) { return static_cast<size_t>(cut.size(r)) * element; };
  const size_t own = bytes(rank_);
  char* received = scratch(own * size_);
  std::vector<const void*> inputs(size_);
  auto moves = transfers();
  for (size_t r = 0; r < size_; ++r) {
    inputs[r] = r == rank_ ? at(op.in, offset(r)) : received + r * own;
    if (r != rank_) moves[r] = {at(op.in, offset(r)), bytes(r), received + r * own, own};
  }
  exchange(op, 0, moves);
  reduce_ordered(at(op.out, offset(rank_)), inputs, cut.size(rank_), op.sig.dtype, op.sig.reduce);
  for (size_t r = 0; r < size_; ++r)
    if (r != rank_) moves[r] = {at(op.out, offset(rank_)), own, at(op.out, offset(r)), bytes(r)};
  exchange(op, 1, moves);
}

}  // namespace fsdpp::comm

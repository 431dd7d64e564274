#include "engine/step_check.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/enforce.h"
#include "base/fnv.h"
#include "engine/first_difference.h"

namespace fsdpp::engine {
namespace {

const char* name_of(StepCheck::Kind kind) {
  switch (kind) {
    case StepCheck::Kind::Gather: return "gather";
    case StepCheck::Kind::Reduce: return "reduction";
    case StepCheck::Kind::AllReduce: return "all-reduce";
  }
  return "";
}

}  // namespace

StepCheck::~StepCheck() {
  try {
    if (outstanding_) done_.synchronize();
  } catch (...) {  // a lost device can't be waited for
  }
}

void StepCheck::note(Kind kind, std::string_view unit, int64_t bytes) {
  auto& hash = hashes_[static_cast<size_t>(kind)];
  hash = fnv1a_step(fnv1a_step(hash, fnv1a(unit)), static_cast<uint64_t>(bytes));
  notes_.push_back({kind, std::string(unit), bytes});
  reduced_ = reduced_ || kind != Kind::Gather;
}

void StepCheck::forget() {
  notes_.clear();
  hashes_ = {};
  reduced_ = false;
}

void StepCheck::reserve(size_t bytes) {
  if (out_.bytes() == bytes) return;
  out_ = cuda::PinnedBuffer(bytes);
  in_ = cuda::PinnedBuffer(bytes);
  wire_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(mesh_.device()).dtype(at::kByte));
}

void StepCheck::write(const std::vector<char>& flags) {
  auto* bytes = out_.as<char>().data();
  for (uint64_t hash : hashes_)
    for (uint64_t value : {hash, ~hash}) {
      std::memcpy(bytes, &value, sizeof value);
      bytes += sizeof value;
    }
  std::copy(flags.begin(), flags.end(), bytes);
}

void StepCheck::exchange(const std::vector<char>& flags, cuda::StreamView reduce_stream, cuda::StreamView replicate_stream) {
  settle();
  reserve(kHeader + flags.size());
  write(flags);
  auto bytes = static_cast<int64_t>(out_.bytes());
  reduce_stream.wait(cuda::current_stream(mesh_.device()));  // whose memory the wire buffer is
  reduce_stream.copy(wire_.mutable_data_ptr(), out_.data(), bytes);
  comm::Buffer wire{wire_.mutable_data_ptr(), bytes, c10::ScalarType::Byte};
  auto agree = [&](comm::Communicator& comm, cuda::StreamView stream) {
    if (comm.size() > 1) comm.all_reduce(wire, wire, comm::ReduceOp::Max, stream, {.label = "step check"}).wait(stream);
  };
  agree(mesh_.reduce_comm(), reduce_stream);
  replicate_stream.wait(reduce_stream);
  agree(mesh_.replicate_comm(), replicate_stream);
  replicate_stream.copy(in_.data(), wire_.const_data_ptr(), bytes);
  done_.record(replicate_stream);
  outstanding_ = true;
  exchanged_notes_ = std::move(notes_);
  forget();
  if (mesh_.device().is_cpu()) settle();
}

const char* StepCheck::agreed_flags() {
  settle();
  return in_.as<char>().data() + kHeader;
}

void StepCheck::settle() {
  if (!std::exchange(outstanding_, false)) return;
  done_.synchronize();
  if (!orders_agree()) explain();
}

bool StepCheck::orders_agree() const {
  auto bytes = in_.as<unsigned char>();
  constexpr size_t kWidth = sizeof(uint64_t);
  for (size_t kind = 0; kind < kKinds; ++kind)
    for (size_t i = 0; i < kWidth; ++i) {
      size_t at = kind * 2 * kWidth + i;
      if (bytes[at] != static_cast<unsigned char>(~bytes[at + kWidth])) return false;
    }
  return true;
}

// Everybody knows that the orders differ: each rank shows its own, and looks for the first rank that differs from rank 0.
void StepCheck::explain() {
  auto& world = mesh_.world();
  auto key = [&, n = failures_++](int rank) { return fmt::format("order/{}/{}/{}", mesh_.name(), n, rank); };
  std::string own;
  for (auto& note : exchanged_notes_) own += fmt::format("{} of unit '{}', {} bytes\n", name_of(note.kind), note.unit, note.bytes);
  world.store().set(key(world.rank()), own);
  constexpr auto kTimeout = std::chrono::seconds(30);
  auto first = world.store().get(key(0), kTimeout);
  for (int rank = 1; rank < world.size(); ++rank) {
    auto other = world.store().get(key(rank), kTimeout);
    if (other == first) continue;
    auto [line, at_first, at_other] = first_difference(first, other);
    fail_comm(CommErrc::Mismatch,
              "the ranks of mesh '{}' issued collectives in different orders: as number {} of a step rank 0 had [{}], rank {} [{}]. "
              "Expected the same order on every rank. Try: call the same units in the same order on all ranks; where ranks use "
              "different parameters, set_reduce_scatter_unused_params(true).", mesh_.name(), line, at_first, rank, at_other);
  }
  fail_comm(CommErrc::Mismatch, "the ranks of mesh '{}' issued collectives in different orders", mesh_.name());
}

}  // namespace fsdpp::engine

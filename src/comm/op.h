#pragma once
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdpp/comm/communicator.h"

/// What a back end is asked to do, after the checks that all back ends share.
namespace fsdpp::comm {

enum class OpKind : uint8_t { AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Barrier };

/// The part of an operation that all ranks must agree on.
struct Signature {
  OpKind kind = OpKind::Barrier;
  ReduceOp reduce = ReduceOp::Sum;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int32_t root = 0;
  int64_t count = 0;  ///< elements of `in`
  [[nodiscard]] bool operator==(const Signature&) const = default;
};

struct Op {
  Signature sig;
  void* out = nullptr;
  const void* in = nullptr;
  uint64_t sequence = 0;
  std::string label;
  std::chrono::milliseconds timeout{0};

  [[nodiscard]] size_t in_bytes() const { return static_cast<size_t>(sig.count) * c10::elementSize(sig.dtype); }
};

[[nodiscard]] std::string_view name_of(OpKind kind);
[[nodiscard]] bool reduces(OpKind kind);

/// "reduce_scatter(sum) of 128 BFloat16 'layers.0 backward'".
[[nodiscard]] std::string describe(const Signature& sig, std::string_view label);
/// "reduce_scatter #12 'layers.0 backward'".
[[nodiscard]] std::string short_name(const Op& op);

/// Labels agree when they are equal, or when either is empty.
[[nodiscard]] bool labels_agree(std::string_view a, std::string_view b);

/// The text of a mismatch between two world ranks.
[[nodiscard]] std::string mismatch_text(const std::string& comm, uint64_t sequence, int rank_a, const std::string& a,
                                        int rank_b, const std::string& b);

}  // namespace fsdpp::comm

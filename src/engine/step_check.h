#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdpp/comm/mesh.h"
#include "fsdpp/cuda/pinned.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::engine {

/// What all ranks of a mesh tell each other once in a backward: in which order they issued collectives, and for which
/// parameters they had a gradient.
///
/// One small all-reduce (maximum, bytes) on each axis, behind the last reduction, which the compute stream does not wait for. The
/// bytes are a hash of the order and its complement (both maxima agree only if all hashes do) and one flag for each parameter.
/// NCCL itself goes on with wrong data when the order differs and the sizes happen to fit; here it becomes an error that names
/// ranks and units: on CPU back ends in the same backward, on CUDA in the next one, since nobody waits for the verdict.
class StepCheck {
 public:
  enum class Kind { Gather, Reduce, AllReduce };

  explicit StepCheck(comm::Mesh& mesh) : mesh_(mesh) {}
  ~StepCheck();
  StepCheck(const StepCheck&) = delete;
  StepCheck& operator=(const StepCheck&) = delete;

  void note(Kind kind, std::string_view unit, int64_t bytes);
  /// Whether this rank issued a reduction since the last exchange.
  [[nodiscard]] bool reduced() const noexcept { return reduced_; }
  /// Queues the exchange: on `reduce_stream` among the shard axis, then on `replicate_stream` among the replicas. Collective.
  /// Throws CommError{Mismatch} if the exchange before this one shows a difference.
  void exchange(const std::vector<char>& flags, cuda::StreamView reduce_stream, cuda::StreamView replicate_stream);
  /// The maximum of every rank's flags. Blocks the host until the last exchange is complete. Throws as exchange().
  [[nodiscard]] const char* agreed_flags();
  /// Forgets the order noted since the last exchange (after a failed step).
  void forget();

 private:
  static constexpr size_t kKinds = 3;
  static constexpr size_t kHeader = kKinds * 2 * sizeof(uint64_t);
  struct Note {
    Kind kind;
    std::string unit;
    int64_t bytes;
  };
  void reserve(size_t bytes);
  void write(const std::vector<char>& flags);
  void settle();
  [[nodiscard]] bool orders_agree() const;
  [[noreturn]] void explain();

  comm::Mesh& mesh_;
  std::vector<Note> notes_, exchanged_notes_;
  std::array<uint64_t, kKinds> hashes_{};
  cuda::PinnedBuffer out_, in_;
  at::Tensor wire_;
  cuda::Event done_;
  bool reduced_ = false, outstanding_ = false;
  int failures_ = 0;
};

}  // namespace fsdpp::engine

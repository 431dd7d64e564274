#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "engine/init_record.h"
#include "fsdpp/shard/plan.h"

namespace fsdpp::engine {

/// What random steps draw from: see [Note: Random numbers].
struct RandomKey {
  uint64_t seed = 0, stream = 0;
};

/// Bytes of host memory through which values go to another device, at most.
inline constexpr int64_t kStagingBytes = int64_t{64} << 20;

/// Computes a snapshot's values, element by element of its row-major order. REQUIRES: !obstacle(snapshot).
class InitValues {
 public:
  InitValues(InitSnapshot snapshot, RandomKey key);
  /// Writes elements [range.begin, range.end) to `local`: contiguous, dtype of the snapshot, range.size() elements, any device. The
  /// host's threads share the work; on CUDA the host waits for the copies.
  void fill(const at::Tensor& local, shard::Range range) const;

 private:
  void write(int64_t first, int64_t count, void* out) const;
  void compute(int64_t first, std::span<double> values) const;

  InitSnapshot snapshot_;
  RandomKey key_;
  bool contiguous_ = false;
  at::Tensor whole_;                  ///< the value of a lone replay, to be copied as it is
  std::vector<at::Tensor> replayed_;  ///< by step: its value in double, or undefined
};

/// All of it as a CPU tensor. REQUIRES: is_deterministic(snapshot).
[[nodiscard]] at::Tensor value_of(const InitSnapshot& snapshot);

}  // namespace fsdpp::engine

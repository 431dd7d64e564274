#pragma once
// Micro-batches of tokens, and the thread that prepares them.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tokens.h"

namespace minillm {

struct Batch {
  at::Tensor inputs, targets;  // (batch, seq) int64
};

struct BatchShape {
  int64_t batch = 8;  // samples of one rank
  int64_t seq = 1024;
  int rank = 0;
  int world_size = 1;
};

/// Fills micro-batches of one rank. Any micro-batch at any time, always the same content.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// Writes micro-batch `m`: `inputs` and `targets` hold batch·seq tokens each, sample after sample. Called from one thread.
  virtual void fill(int64_t m, std::span<int64_t> inputs, std::span<int64_t> targets) = 0;
};

/// Sample i is tokens [i·seq, i·seq+seq) with targets one further; there are ⌊(tokens−1)/seq⌋. Micro-batch m of rank r takes
/// samples (m·W + r)·batch … +batch−1, modulo their number, through a permutation if `shuffle` (a seed) is given.
[[nodiscard]] std::unique_ptr<BatchSource> file_batches(const std::vector<std::string>& paths, int64_t vocab, const BatchShape& shape,
                                                        const uint64_t* shuffle = nullptr);

/// Uniform random tokens, a function of seed, micro-batch, rank and place alone.
[[nodiscard]] std::unique_ptr<BatchSource> synthetic_batches(uint64_t seed, int64_t vocab, const BatchShape& shape);

/// The permutation of [0, n) that --shuffle uses; the same on every machine.
[[nodiscard]] std::vector<int64_t> permutation(int64_t n, uint64_t seed);

/// Prepares micro-batches 0, 1, …, count−1 on a thread of its own, a few ahead, in pinned memory for a CUDA device.
class Loader {
 public:
  Loader(std::unique_ptr<BatchSource> source, BatchShape shape, int64_t count, c10::Device device);
  /// Stops and joins the thread, whatever it is doing.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next micro-batch on the device. Blocks until it is prepared; the copy to a CUDA device is queued on the current stream.
  /// Throws what the source threw, or fsdpp::UsageError after the last.
  [[nodiscard]] Batch next();

 private:
  struct Queue;
  std::unique_ptr<Queue> queue_;
  c10::Device device_;
};

}  // namespace minillm

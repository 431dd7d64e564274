#include <numeric>
#include <span>
#include <utility>

#include "data.h"
#include "fsdpp/base/error.h"
#include "text.h"

namespace minillm {
namespace {

/// SplitMix64's output function: a counter in, 64 well-mixed bits out.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Uniform in [0, bound).
int64_t below(uint64_t bits, int64_t bound) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<int64_t>((Wide{bits} * static_cast<uint64_t>(bound)) >> 64);
}

/// Splits seq + 1 tokens in a row into inputs and targets.
void split(std::span<const int64_t> row, std::span<int64_t> inputs, std::span<int64_t> targets) {
  std::copy(row.begin(), row.end() - 1, inputs.begin());
  std::copy(row.begin() + 1, row.end(), targets.begin());
}

class FileBatches : public BatchSource {
 public:
  FileBatches(const std::vector<std::string>& paths, int64_t vocab, const BatchShape& shape, const uint64_t* shuffle)
      : tokens_(paths, vocab), shape_(shape), samples_((tokens_.size() - 1) / shape.seq), row_(static_cast<size_t>(shape.seq) + 1) {
    if (tokens_.size() <= shape.seq)
      throw fsdpp::ConfigError(text("--data ", paths.front(), paths.size() > 1 ? " and more" : "", ": ", tokens_.size(),
                                    " tokens make no sample of --seq ", shape.seq, "; at least ", shape.seq + 1, " are needed"));
    if (shuffle != nullptr) order_ = permutation(samples_, *shuffle);
  }

  void fill(int64_t m, std::span<int64_t> inputs, std::span<int64_t> targets) override {
    const auto seq = static_cast<size_t>(shape_.seq);
    const auto first = (m * shape_.world_size + shape_.rank) * shape_.batch;
    for (int64_t b = 0; b < shape_.batch; ++b) {
      auto sample = (first + b) % samples_;
      if (!order_.empty()) sample = order_[static_cast<size_t>(sample)];
      tokens_.read(sample * shape_.seq, row_);
      const auto at = static_cast<size_t>(b) * seq;
      split(row_, inputs.subspan(at, seq), targets.subspan(at, seq));
    }
  }

 private:
  TokenFiles tokens_;
  BatchShape shape_;
  int64_t samples_;
  std::vector<int64_t> order_;
  std::vector<int64_t> row_;
};

class SyntheticBatches : public BatchSource {
 public:
  SyntheticBatches(uint64_t seed, int64_t vocab, const BatchShape& shape)
      : seed_(seed), vocab_(vocab), shape_(shape), row_(static_cast<size_t>(shape.seq) + 1) {}

  void fill(int64_t m, std::span<int64_t> inputs, std::span<int64_t> targets) override {
    const auto seq = static_cast<size_t>(shape_.seq);
    uint64_t counter = mix(mix(mix(seed_) ^ static_cast<uint64_t>(m)) ^ static_cast<uint64_t>(shape_.rank));
    for (size_t at = 0; at < inputs.size(); at += seq) {
      for (auto& token : row_) token = below(mix(counter++), vocab_);
      split(row_, inputs.subspan(at, seq), targets.subspan(at, seq));
    }
  }

 private:
  uint64_t seed_;
  int64_t vocab_;
  BatchShape shape_;
  std::vector<int64_t> row_;
};

}  // namespace

std::vector<int64_t> permutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  uint64_t counter = mix(seed);
  for (auto i = n - 1; i > 0; --i) std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(below(mix(counter++), i + 1))]);
  return order;
}

std::unique_ptr<BatchSource> file_batches(const std::vector<std::string>& paths, int64_t vocab, const BatchShape& shape,
                                          const uint64_t* shuffle) {
  return std::make_unique<FileBatches>(paths, vocab, shape, shuffle);
}

std::unique_ptr<BatchSource> synthetic_batches(uint64_t seed, int64_t vocab, const BatchShape& shape) {
  return std::make_unique<SyntheticBatches>(seed, vocab, shape);
}

}  // namespace minillm

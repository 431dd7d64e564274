#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace fsdpp::optim {

/// `numel` elements of up to six arrays that are worked on together (parameter, gradient, optimizer state, the parameter in 16 bits).
struct FlatRange {
  struct Array {
    char* data = nullptr;
    int64_t width = 0;              ///< bytes of an element; 0: not used
    const void* storage = nullptr;  ///< the storage that data points into
  };
  std::array<Array, 6> arrays;
  int64_t numel = 0;
  size_t order = 0;               ///< place in the list that was joined
  std::array<int64_t, 5> kind{};  ///< ranges of different kinds (dtypes, step, …) never join
  c10::Device device = c10::kCPU;
};

/// The memory of a non-overlapping, dense tensor.
[[nodiscard]] FlatRange::Array array_of(const at::Tensor& tensor);

/// Joins ranges of the same storages that follow each other in all of their arrays, into as few as possible, over gaps
/// of up to `max_gap_bytes` (in the first array); empty ranges vanish. The result is in the order of the list given,
/// not of addresses, so that sums over it are the same bits in every run.
[[nodiscard]] std::vector<FlatRange> join_neighbours(std::vector<FlatRange> ranges, int64_t max_gap_bytes);

/// Elements [begin, begin + numel) of a range.
[[nodiscard]] FlatRange part_of(const FlatRange& range, int64_t begin, int64_t numel);

}  // namespace fsdpp::optim

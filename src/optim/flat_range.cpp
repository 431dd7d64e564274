#include "optim/flat_range.h"

#include <algorithm>
#include <functional>

namespace fsdpp::optim {
namespace {

bool follows(const FlatRange& run, const FlatRange& next, int64_t max_gap_bytes) {
  if (run.kind != next.kind || run.device != next.device) return false;
  const int64_t width = run.arrays[0].width;
  const int64_t bytes = next.arrays[0].data - run.arrays[0].data;
  if (bytes % width != 0) return false;
  const int64_t distance = bytes / width;
  const int64_t gap = distance - run.numel;
  if (gap < 0 || gap * width > max_gap_bytes) return false;
  for (size_t k = 0; k < run.arrays.size(); ++k) {
    const auto& a = run.arrays[k];
    const auto& b = next.arrays[k];
    if (a.width != b.width) return false;
    if (a.width != 0 && b.data - a.data != distance * a.width) return false;
    if (a.storage != b.storage) return false;  // which storages are neighbours is chance
  }
  return true;
}

}  // namespace

FlatRange::Array array_of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.mutable_data_ptr()), static_cast<int64_t>(tensor.element_size()),
          tensor.storage().unsafeGetStorageImpl()};
}

std::vector<FlatRange> join_neighbours(std::vector<FlatRange> ranges, int64_t max_gap_bytes) {
  for (size_t i = 0; i < ranges.size(); ++i) ranges[i].order = i;
  std::erase_if(ranges, [](const FlatRange& r) { return r.numel == 0; });
  std::sort(ranges.begin(), ranges.end(),
            [](const FlatRange& a, const FlatRange& b) { return std::less<>()(a.arrays[0].data, b.arrays[0].data); });
  std::vector<FlatRange> runs;
  for (const FlatRange& range : ranges) {
    if (!runs.empty() && follows(runs.back(), range, max_gap_bytes)) {
      FlatRange& run = runs.back();
      run.numel = (range.arrays[0].data - run.arrays[0].data) / run.arrays[0].width + range.numel;
      run.order = std::min(run.order, range.order);
    } else {
      runs.push_back(range);
    }
  }
  std::sort(runs.begin(), runs.end(), [](const FlatRange& a, const FlatRange& b) { return a.order < b.order; });
  return runs;
}

FlatRange part_of(const FlatRange& range, int64_t begin, int64_t numel) {
  FlatRange part = range;
  part.numel = numel;
  for (FlatRange::Array& array : part.arrays) array.data += begin * array.width;
  return part;
}

}  // namespace fsdpp::optim

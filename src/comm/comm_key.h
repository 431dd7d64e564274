#pragma once
#include <map>
#include <string>
#include <vector>

namespace fsdpp::comm {

/// Key of a communicator in the store: its name, its ranks, and how often this rank has used that pair, so that a name
/// may come again. Members count alike because making a communicator is collective over its ranks.
class CommKeys {
 public:
  [[nodiscard]] std::string next(const std::string& name, const std::vector<int>& ranks, int world_size);

 private:
  std::map<std::string, int> used_;
};

/// Sorted world ranks of a new communicator: all for an empty list. Throws UsageError for a list that is not sorted,
/// has a rank outside the world, or lacks `rank`.
[[nodiscard]] std::vector<int> member_ranks(const std::string& name, std::vector<int> ranks, int rank, int world_size);
/// Place of `rank` in `ranks`.
[[nodiscard]] int index_of(const std::vector<int>& ranks, int rank);

}  // namespace fsdpp::comm

#include "comm/comm_key.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/enforce.h"

namespace fsdpp::comm {

std::string CommKeys::next(const std::string& name, const std::vector<int>& ranks, int world_size) {
  std::string key = name;
  if (static_cast<int>(ranks.size()) != world_size) key += fmt::format("[{}]", fmt::join(ranks, ","));
  const int use = used_[key]++;
  return use == 0 ? key : fmt::format("{}~{}", key, use + 1);
}

std::vector<int> member_ranks(const std::string& name, std::vector<int> ranks, int rank, int world_size) {
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const bool sorted = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  const bool inside = ranks.front() >= 0 && ranks.back() < world_size;
  const bool member = std::binary_search(ranks.begin(), ranks.end(), rank);
  FSDPP_ENFORCE(sorted && inside && member, UsageError,
                "communicator '{}': expected different ranks from 0 to {} in rising order, {} among them, got [{}]",
                name, world_size - 1, rank, fmt::join(ranks, ", "));
  return ranks;
}

int index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace fsdpp::comm

#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdpp/engine/unit_stats.h"

namespace fsdpp::test::oracle {

/// What one rank saw of one case.
struct RankResult {
  std::vector<double> losses;          ///< of each step and micro-batch, in that order
  std::vector<double> norms;           ///< of the gradients, before clipping, of each step
  double final_loss = 0;               ///< of a forward without gradients after the last step
  std::vector<UnitStats> stats;        ///< of each unit of the case, training only
  std::map<std::string, int64_t> wire; ///< operations of the mesh's communicators by kind, training only
  std::vector<std::pair<std::string, at::Tensor>> weights;  ///< full, at the end
};

/// All ranks of one case, each a thread. `sharded` false: the same program without fully_shard, for cases of one rank.
[[nodiscard]] std::vector<RankResult> run_case(const nlohmann::json& c, bool sharded);

}  // namespace fsdpp::test::oracle

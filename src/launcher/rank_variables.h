#pragma once
#include <map>
#include <string>
#include <vector>

#include "launcher/options.h"

namespace fsdpp::launcher {

/// One start of all ranks of this node.
struct Attempt {
  int restart_count = 0;
  std::string run_id;       ///< the same for all attempts (and nodes) of a run
  std::string master_addr;  ///< never empty
  int master_port = 0;
};

using Variables = std::map<std::string, std::string>;

/// The variables that fsdpp-run sets for one rank over the inherited ones. `inherited` decides what is left to the
/// user: OMP_NUM_THREADS and, with --ranks-per-gpu, every NCCL and CUDA setting.
[[nodiscard]] Variables rank_variables(const LaunchOptions& options, const Attempt& attempt, int local_rank,
                                       const std::string& error_file, const Variables& inherited);

/// The environment of this process as a map.
[[nodiscard]] Variables inherited_variables();

/// "NAME=value" strings of `inherited` with `changes` applied; variables of an outer torchrun that would mislead are
/// dropped.
[[nodiscard]] std::vector<std::string> merge_variables(const Variables& inherited, const Variables& changes);

}  // namespace fsdpp::launcher

#pragma once
#include <functional>
#include <optional>
#include <string>

#include "fsdpp/base/export.h"

/// Who this process is, as its launcher says through environment variables.
namespace fsdpp {

struct RankEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< number on its host
  int local_world_size = 1;  ///< ranks on its host
  int node_rank = 0;         ///< number of the host; -1 where the launcher does not say
  /// "fsdpp-run", "torchrun" (also RANK and WORLD_SIZE set by hand), "openmpi", "slurm", "mpich" (Hydra: MPICH, Intel
  /// MPI), "single" (none recognised).
  std::string launcher = "single";
  /// Where rank 0's store listens. Empty and 0 if the world is this process alone and nothing was set.
  std::string master_addr;
  int master_port = 0;
  /// A store runs at that address already: every rank, 0 included, is a client.
  bool use_agent_store = false;
  int restart_count = 0;  ///< attempts before this one
  std::string run_id;     ///< equal on all ranks of a run; empty for "single"
};

/// The value of a variable, or nothing when it is unset or empty.
using EnvLookup = std::function<std::optional<std::string>(const char* name)>;

/// Asks in this order and obeys the first that is there: fsdpp-run and torchrun (RANK, WORLD_SIZE), Open MPI
/// (OMPI_COMM_WORLD_RANK), Hydra (PMI_RANK with MPI_LOCALRANKID), Slurm (SLURM_PROCID inside a step of several tasks),
/// other PMI (PMI_RANK), else one process.
///
/// MPI and Slurm name no port, and MPI no host: MASTER_ADDR and MASTER_PORT are obeyed if set; else the host is
/// 127.0.0.1 if all ranks are on it (Slurm: the first host of the step), and the port, in [20000, 32000), follows from
/// the job's id, so that two jobs on one host differ.
///
/// No communication. Throws ConfigError that names the variable and its value: not a number, out of range, rank ≥ world
/// size, one of a pair missing, no MASTER_ADDR for ranks on several hosts.
[[nodiscard]] FSDPP_API RankEnv detect_rank_env();

/// The same from other variables; `parent_pid` stands for the launcher where it gives no job id.
[[nodiscard]] FSDPP_API RankEnv detect_rank_env(const EnvLookup& lookup, int parent_pid);

}  // namespace fsdpp

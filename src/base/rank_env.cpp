#include "fsdpp/base/rank_env.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "base/enforce.h"
#include "base/fnv.h"
#include "base/env.h"
#include "base/slurm.h"
#include "fsdpp/base/log.h"

namespace fsdpp {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr int kMaxPort = 65535;
// Below the ports that Linux hands out by itself (32768 and up).
constexpr int kFirstDerivedPort = 20000;
constexpr int kDerivedPorts = 12000;

class Variables {
 public:
  explicit Variables(const EnvLookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] std::optional<std::string> text(const char* name) const { return lookup_(name); }
  [[nodiscard]] bool has(const char* name) const { return lookup_(name).has_value(); }

  [[nodiscard]] std::optional<int> number(const char* name, int low, int high) const {
    const auto text = lookup_(name);
    if (!text) return std::nullopt;
    int value = 0;
    auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    FSDPP_ENFORCE(error == std::errc{} && end == text->data() + text->size() && value >= low && value <= high,
                  ConfigError, "environment variable {}: expected a whole number from {} to {}, got '{}'", name, low,
                  high, *text);
    return value;
  }
  [[nodiscard]] int required(const char* name, int low, int high, const char* because) const {
    const auto value = number(name, low, high);
    FSDPP_ENFORCE(value, ConfigError, "environment variable {} is not set, but it is needed because {}", name, because);
    return *value;
  }
  [[nodiscard]] std::string first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names)
      if (auto value = lookup_(name)) return *value;
    return {};
  }

 private:
  const EnvLookup& lookup_;
};

// A pair "number of count", such as RANK and WORLD_SIZE.
struct Place {
  int index = 0;
  int count = 1;
};
Place read_place(const Variables& env, const char* index_name, const char* count_name) {
  const std::string count_set = fmt::format("{} is set", count_name), index_set = fmt::format("{} is set", index_name);
  Place place;
  place.count = env.required(count_name, 1, kMaxInt, index_set.c_str());
  place.index = env.required(index_name, 0, kMaxInt, count_set.c_str());
  FSDPP_ENFORCE(place.index < place.count, ConfigError,
                "environment variable {}: expected 0 to {} because {}={}, got '{}'", index_name, place.count - 1,
                count_name, place.count, place.index);
  return place;
}

void set_global(RankEnv& result, Place place) {
  result.rank = place.index;
  result.world_size = place.count;
}
void set_local(RankEnv& result, Place place, const char* count_name) {
  FSDPP_ENFORCE(place.count <= result.world_size, ConfigError,
                "environment variable {}: expected at most the world size {}, got '{}'", count_name, result.world_size,
                place.count);
  result.local_rank = place.index;
  result.local_world_size = place.count;
}

int derived_port(const std::string& job) {
  return kFirstDerivedPort + static_cast<int>(fnv1a(job) % kDerivedPorts);
}

// For launchers that say nothing about a master. `job` names the job on all its ranks, or is empty; `first_host` is
// rank 0's host, or empty.
void set_master(RankEnv& result, const Variables& env, const std::string& job, const std::string& first_host,
                int parent_pid) {
  const bool one_host = result.local_world_size == result.world_size;
  result.run_id = job.empty() ? fmt::format("pid{}", parent_pid) : job;
  result.master_addr = env.text("MASTER_ADDR").value_or(one_host ? "127.0.0.1" : first_host);
  FSDPP_ENFORCE(!result.master_addr.empty(), ConfigError,
                "environment variable MASTER_ADDR is not set, but {} names no host for rank 0 and only {} of {} ranks "
                "are on this "
                "host. Try: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 (Hydra: -genv)",
                result.launcher, result.local_world_size, result.world_size);
  if (auto port = env.number("MASTER_PORT", 1, kMaxPort)) {
    result.master_port = *port;
    return;
  }
  FSDPP_ENFORCE(one_host || !job.empty(), ConfigError,
                "environment variable MASTER_PORT is not set, but {} gives no job id to derive a port from. Try: "
                "MASTER_PORT=29500",
                result.launcher);
  if (job.empty()) result.run_id += "@" + result.master_addr;
  result.master_port = derived_port(result.run_id);
}

// ---- torchrun, fsdpp-run, or set by hand ----

void read_torchrun_local(RankEnv& result, const Variables& env) {
  if (env.has("LOCAL_RANK") && !env.has("LOCAL_WORLD_SIZE")) {
    // Set by hand, as many Python scripts have it. Right where all ranks are on one host.
    result.local_rank = env.required("LOCAL_RANK", 0, result.world_size - 1, "RANK is set");
    FSDPP_ENFORCE(result.local_rank == result.rank, ConfigError,
                  "environment variable LOCAL_WORLD_SIZE is not set, but it is needed because RANK={} and "
                  "LOCAL_RANK={} show several hosts",
                  result.rank, result.local_rank);
    result.local_world_size = result.world_size;
  } else if (env.has("LOCAL_RANK") || env.has("LOCAL_WORLD_SIZE") || result.world_size > 1) {
    set_local(result, read_place(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE");
  }
  result.node_rank = env.number("GROUP_RANK", 0, kMaxInt).value_or(result.rank / result.local_world_size);
}

RankEnv from_torchrun(const Variables& env) {
  RankEnv result;
  result.launcher = env.has("FSDPP_RUN") ? "fsdpp-run" : "torchrun";
  set_global(result, read_place(env, "RANK", "WORLD_SIZE"));
  read_torchrun_local(result, env);
  if (result.world_size > 1 || env.has("MASTER_ADDR") || env.has("MASTER_PORT")) {
    const std::string because =
        result.world_size > 1 ? fmt::format("WORLD_SIZE={}", result.world_size) : "the other of the pair is set";
    FSDPP_ENFORCE(env.has("MASTER_ADDR"), ConfigError,
                  "environment variable MASTER_ADDR is not set, but it is needed because {}. Try: start the program "
                  "with fsdpp-run, "
                  "torchrun --no-python or mpirun",
                  because);
    result.master_addr = *env.text("MASTER_ADDR");
    result.master_port = env.required("MASTER_PORT", 1, kMaxPort, because.c_str());
  }
  const auto agent = env.text("TORCHELASTIC_USE_AGENT_STORE");
  result.use_agent_store = agent && (*agent == "True" || *agent == "true" || *agent == "1");
  result.restart_count = env.number("TORCHELASTIC_RESTART_COUNT", 0, kMaxInt).value_or(0);
  result.run_id = env.text("TORCHELASTIC_RUN_ID").value_or("none");
  return result;
}

// A container or shell with RANK left over from elsewhere would make every MPI process rank 0 of 1 without a word.
void warn_of_conflict(const RankEnv& result, const Variables& env) {
  if (env.has("TORCHELASTIC_RUN_ID")) return;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (auto other = env.text(name); other && *other != std::to_string(result.rank))
      log::warn(fmt::format("RANK={} but {}={}: RANK and WORLD_SIZE win. Unset them to follow the other launcher",
                            result.rank, name, *other));
}

// ---- MPI and Slurm ----

RankEnv from_openmpi(const Variables& env, int parent_pid) {
  RankEnv result;
  result.launcher = "openmpi";
  set_global(result, read_place(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"));
  set_local(result, read_place(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            "OMPI_COMM_WORLD_LOCAL_SIZE");
  result.node_rank = result.local_world_size == result.world_size ? 0 : -1;
  set_master(result, env, env.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}), {}, parent_pid);
  return result;
}

RankEnv from_pmi(const Variables& env, int parent_pid) {
  RankEnv result;
  result.launcher = "mpich";
  set_global(result, read_place(env, "PMI_RANK", "PMI_SIZE"));
  if (env.has("MV2_COMM_WORLD_LOCAL_RANK"))
    set_local(result, read_place(env, "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
              "MV2_COMM_WORLD_LOCAL_SIZE");
  else if (result.world_size > 1 || env.has("MPI_LOCALRANKID"))
    set_local(result, read_place(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS");
  result.node_rank = result.local_world_size == result.world_size ? 0 : -1;
  set_master(result, env, env.first_of({"PMI_JOBID", "PMI_ID_JOB", "PALS_APID"}), {}, parent_pid);
  return result;
}

RankEnv from_slurm(const Variables& env, int parent_pid) {
  RankEnv result;
  result.launcher = "slurm";
  set_global(result, read_place(env, "SLURM_PROCID", env.has("SLURM_NTASKS") ? "SLURM_NTASKS" : "SLURM_NPROCS"));
  constexpr const char* because = "SLURM_PROCID is set";
  result.node_rank = env.required("SLURM_NODEID", 0, kMaxInt, because);
  const auto tasks = env.text("SLURM_STEP_TASKS_PER_NODE");
  FSDPP_ENFORCE(tasks, ConfigError,
                "environment variable SLURM_STEP_TASKS_PER_NODE is not set, but it is needed because {}", because);
  Place local;
  local.count = slurm::tasks_on_node(*tasks, result.node_rank, "SLURM_STEP_TASKS_PER_NODE");
  local.index = env.required("SLURM_LOCALID", 0, local.count - 1, because);
  set_local(result, local, "SLURM_STEP_TASKS_PER_NODE");
  const char* list = env.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  const auto nodes = env.text(list);
  const auto job = fmt::format("{}.{}", env.first_of({"SLURM_JOB_ID", "SLURM_JOBID"}), env.first_of({"SLURM_STEP_ID"}));
  set_master(result, env, job, nodes ? slurm::first_host(*nodes, list) : std::string{}, parent_pid);
  return result;
}

bool in_slurm_step(const Variables& env) {
  // A shell inside salloc has SLURM_* too, but no step, or a step of one task.
  if (!env.has("SLURM_PROCID") || !env.has("SLURM_STEP_ID")) return false;
  const char* count = env.has("SLURM_NTASKS") ? "SLURM_NTASKS" : "SLURM_NPROCS";
  return env.number(count, 1, kMaxInt).value_or(1) > 1;
}

}  // namespace

RankEnv detect_rank_env(const EnvLookup& lookup, int parent_pid) {
  const Variables env(lookup);
  if (env.has("RANK") || env.has("WORLD_SIZE")) {
    auto result = from_torchrun(env);
    warn_of_conflict(result, env);
    return result;
  }
  if (env.has("OMPI_COMM_WORLD_RANK") || env.has("OMPI_COMM_WORLD_SIZE")) return from_openmpi(env, parent_pid);
  // Hydra starts its proxies with srun, so SLURM_PROCID is the proxy's there.
  if (env.has("PMI_RANK") && env.has("MPI_LOCALRANKID")) return from_pmi(env, parent_pid);
  if (in_slurm_step(env)) return from_slurm(env, parent_pid);
  if (env.has("PMI_RANK") || env.has("PMI_SIZE")) return from_pmi(env, parent_pid);
  return {};
}

RankEnv detect_rank_env() {
  return detect_rank_env([](const char* name) { return env::get(name); }, ::getppid());
}

}  // namespace fsdpp

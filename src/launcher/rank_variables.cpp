#include "launcher/rank_variables.h"

#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <thread>
#include <utility>

namespace fsdpp::launcher {
namespace {

// Several ranks on one GPU: NCCL refuses two ranks with one host identity on one GPU, so each rank gets an identity of
// its own, and everything is pinned to the plain, deterministic socket path. Two kernels that wait for each other need
// few CTAs, a hardware queue each, and no lazy module loading behind a spinning kernel.
constexpr std::pair<const char*, const char*> kSharedGpu[] = {
    {"NCCL_NET", "Socket"},
    {"NCCL_NET_PLUGIN", "none"},
    {"NCCL_IB_DISABLE", "1"},
    {"NCCL_SOCKET_IFNAME", "=lo"},
    {"NCCL_SOCKET_FAMILY", "AF_INET"},
    {"NCCL_NVLS_ENABLE", "0"},
    {"NCCL_MNNVL_ENABLE", "0"},
    {"NCCL_COLLNET_ENABLE", "0"},
    {"NCCL_P2P_DISABLE", "1"},
    {"NCCL_SHM_DISABLE", "1"},
    {"NCCL_ALGO", "Ring"},
    {"NCCL_PROTO", "Simple"},
    {"NCCL_MAX_CTAS", "2"},
    {"NCCL_BUFFSIZE", "1048576"},
    {"NCCL_SOCKET_NTHREADS", "1"},
    {"NCCL_NSOCKS_PERTHREAD", "1"},
    {"NCCL_RAS_ENABLE", "0"},
    {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
    {"NCCL_GRAPH_MIXING_SUPPORT", "1"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "32"},
    {"CUDA_MODULE_LOADING", "EAGER"},
};

// Of an outer torchrun: they would send this job's ranks to that job's store.
constexpr std::string_view kDropped[] = {"TORCHELASTIC_USE_AGENT_STORE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"};

void add_shared_gpu(Variables& set, const LaunchOptions& options, const Attempt& attempt, int rank,
                    const Variables& inherited) {
  set["FSDPP_RANKS_PER_GPU"] = std::to_string(options.ranks_per_gpu);
  auto add_unless_set = [&](const char* name, const std::string& value) {
    if (!inherited.contains(name)) set[name] = value;
  };
  add_unless_set("NCCL_HOSTID", attempt.run_id + "-rank" + std::to_string(rank));
  for (const auto& [name, value] : kSharedGpu) add_unless_set(name, value);
}

}  // namespace

Variables rank_variables(const LaunchOptions& options, const Attempt& attempt, int local_rank,
                         const std::string& error_file, const Variables& inherited) {
  const int rank = options.first_rank() + local_rank;
  Variables set = {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(options.world_size())},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.nnodes)},
      {"MASTER_ADDR", attempt.master_addr},
      {"MASTER_PORT", std::to_string(attempt.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", attempt.run_id},
      {"TORCHELASTIC_ERROR_FILE", error_file},
      {"FSDPP_RUN", "1"},
  };
  if (options.nproc_per_node > 1 && !inherited.contains("OMP_NUM_THREADS")) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    set["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / options.nproc_per_node));
  }
  if (options.ranks_per_gpu > 0) add_shared_gpu(set, options, attempt, rank, inherited);
  return set;
}

Variables inherited_variables() {
  Variables result;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    if (auto equals = text.find('='); equals != std::string_view::npos)
      result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

std::vector<std::string> merge_variables(const Variables& inherited, const Variables& changes) {
  Variables merged = changes;
  merged.insert(inherited.begin(), inherited.end());
  for (auto name : kDropped) merged.erase(std::string(name));
  std::vector<std::string> result;
  result.reserve(merged.size());
  for (const auto& [name, value] : merged) result.push_back(name + "=" + value);
  return result;
}

}  // namespace fsdpp::launcher

#include "fsdpp/base/rank_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/slurm.h"
#include "fsdpp/base/error.h"

namespace fsdpp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Table = std::map<std::string, std::string>;

RankEnv detect(const Table& table, int parent_pid = 100) {
  return detect_rank_env(
      [&](const char* name) -> std::optional<std::string> {
        auto it = table.find(name);
        return it == table.end() || it->second.empty() ? std::nullopt : std::optional(it->second);
      },
      parent_pid);
}

std::string error_of(const Table& table) {
  try {
    (void)detect(table);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

Table with(Table base, const Table& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

const Table kTorchrun = {{"RANK", "3"},
                         {"WORLD_SIZE", "4"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "2"},
                         {"GROUP_RANK", "1"},
                         {"MASTER_ADDR", "node0"},
                         {"MASTER_PORT", "29501"},
                         {"TORCHELASTIC_RUN_ID", "job7"},
                         {"TORCHELASTIC_RESTART_COUNT", "2"},
                         {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Table kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"PMIX_NAMESPACE", "prterun-host-1@1"}};
const Table kHydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Table kSlurm = {{"SLURM_PROCID", "9"},
                      {"SLURM_NTASKS", "12"},
                      {"SLURM_LOCALID", "1"},
                      {"SLURM_NODEID", "2"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_JOB_ID", "77"},
                      {"SLURM_STEP_TASKS_PER_NODE", "4(x3)"},
                      {"SLURM_STEP_NODELIST", "gpu[08-09,11]"}};

TEST(RankEnv, NothingSetThenSingleProcess) {
  const auto env = detect({});
  EXPECT_EQ(env.launcher, "single");
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_EQ(env.master_port, 0);
  EXPECT_TRUE(env.master_addr.empty());
}

TEST(RankEnv, TorchrunThenEveryFieldIsRead) {
  const auto env = detect(kTorchrun);
  EXPECT_EQ(env.launcher, "torchrun");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node_rank, 1);
  EXPECT_EQ(env.master_addr, "node0");
  EXPECT_EQ(env.master_port, 29501);
  EXPECT_TRUE(env.use_agent_store);
  EXPECT_EQ(env.restart_count, 2);
  EXPECT_EQ(env.run_id, "job7");
}

TEST(RankEnv, FsdppRunThenNamedAndNoAgentStore) {
  auto table = with(kTorchrun, {{"FSDPP_RUN", "1"}});
  table.erase("TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_EQ(detect(table).launcher, "fsdpp-run");
  EXPECT_FALSE(detect(table).use_agent_store);
}

TEST(RankEnv, SeveralLaunchersThenTorchrunWinsThenOpenMpi) {
  auto all = kTorchrun;
  for (const auto& other : {kOpenMpi, kHydra, kSlurm}) all.insert(other.begin(), other.end());
  EXPECT_EQ(detect(all).launcher, "torchrun");
  all.erase("RANK");
  all.erase("WORLD_SIZE");
  EXPECT_EQ(detect(all).launcher, "openmpi");
}

TEST(RankEnv, HydraInsideSlurmAllocationThenHydraWins) {
  EXPECT_EQ(detect(with(kHydra, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "2"}})).launcher,
            "mpich");
}

TEST(RankEnv, SrunWithPmi2ThenSlurmWins) {
  EXPECT_EQ(detect(with(kSlurm, {{"PMI_RANK", "9"}, {"PMI_SIZE", "12"}})).launcher, "slurm");
}

TEST(RankEnv, ShellInsideSallocThenSingle) {
  auto table = kSlurm;
  table.erase("SLURM_STEP_ID");
  EXPECT_EQ(detect(table).launcher, "single");
  EXPECT_EQ(detect(with(kSlurm, {{"SLURM_NTASKS", "1"}})).launcher, "single");
}

TEST(RankEnv, OpenMpiOnOneHostThenLoopbackAndPortOfTheJob) {
  const auto env = detect(kOpenMpi);
  EXPECT_EQ(env.launcher, "openmpi");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_GE(env.master_port, 20000);
  EXPECT_LT(env.master_port, 32000);
  EXPECT_EQ(env.node_rank, 0);
}

TEST(RankEnv, TwoRanksOfOneJobThenSamePortAndTwoJobsThenOthers) {
  const auto rank0 = detect(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}));
  const auto rank1 = detect(kOpenMpi);
  const auto other = detect(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-host-2@1"}}));
  EXPECT_EQ(rank0.master_port, rank1.master_port);
  EXPECT_EQ(rank0.run_id, rank1.run_id);
  EXPECT_NE(rank0.master_port, other.master_port);
}

TEST(RankEnv, NoJobIdThenParentDecidesThePort) {
  EXPECT_EQ(detect(kHydra, 100).master_port, detect(kHydra, 100).master_port);
  EXPECT_NE(detect(kHydra, 100).master_port, detect(kHydra, 101).master_port);
}

TEST(RankEnv, MasterSetForMpiThenObeyed) {
  const auto env = detect(with(kOpenMpi, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "4242"}}));
  EXPECT_EQ(env.master_addr, "head");
  EXPECT_EQ(env.master_port, 4242);
}

TEST(RankEnv, OpenMpiOnTwoHostsWithoutMasterThenErrorNamesMasterAddr) {
  EXPECT_THAT(error_of(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}})),
              AllOf(HasSubstr("MASTER_ADDR"), HasSubstr("2 of 4")));
}

TEST(RankEnv, HydraOnTwoHostsWithoutJobIdThenErrorNamesMasterPort) {
  EXPECT_THAT(error_of(with(kHydra, {{"PMI_SIZE", "4"}, {"MASTER_ADDR", "head"}})), HasSubstr("MASTER_PORT"));
}

TEST(RankEnv, SlurmStepThenFirstHostIsMaster) {
  const auto env = detect(kSlurm);
  EXPECT_EQ(env.launcher, "slurm");
  EXPECT_EQ(env.rank, 9);
  EXPECT_EQ(env.world_size, 12);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.node_rank, 2);
  EXPECT_EQ(env.master_addr, "gpu08");
  EXPECT_EQ(env.run_id, "77.0");
  EXPECT_EQ(env.master_port, detect(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}})).master_port);
}

struct BadCase {
  const char* name;
  Table table;
  std::vector<const char*> expected;
};
class RankEnvBadValue : public testing::TestWithParam<BadCase> {};

TEST_P(RankEnvBadValue, ThenErrorNamesVariableAndValue) {
  const auto error = error_of(GetParam().table);
  for (const char* part : GetParam().expected) EXPECT_THAT(error, HasSubstr(part));
}

INSTANTIATE_TEST_SUITE_P(
    All, RankEnvBadValue,
    testing::Values(
        BadCase{"world_text", with(kTorchrun, {{"WORLD_SIZE", "abc"}}), {"WORLD_SIZE", "'abc'"}},
        BadCase{"world_trailing", with(kTorchrun, {{"WORLD_SIZE", "4x"}}), {"WORLD_SIZE", "'4x'"}},
        BadCase{"world_zero", with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE", "'0'"}},
        BadCase{"rank_too_big", with(kTorchrun, {{"RANK", "4"}}), {"RANK", "'4'", "WORLD_SIZE=4"}},
        BadCase{"rank_negative", with(kTorchrun, {{"RANK", "-1"}}), {"RANK", "'-1'"}},
        BadCase{"rank_missing", with(kTorchrun, {{"RANK", ""}}), {"RANK is not set", "WORLD_SIZE"}},
        BadCase{"world_missing", with(kTorchrun, {{"WORLD_SIZE", ""}}), {"WORLD_SIZE is not set", "RANK"}},
        BadCase{"local_rank_missing", with(kTorchrun, {{"LOCAL_RANK", ""}}), {"LOCAL_RANK is not set"}},
        BadCase{"local_size_missing", with(kTorchrun, {{"LOCAL_WORLD_SIZE", ""}}), {"LOCAL_WORLD_SIZE is not set"}},
        BadCase{"local_size_too_big", with(kTorchrun, {{"LOCAL_WORLD_SIZE", "8"}}), {"LOCAL_WORLD_SIZE", "'8'"}},
        BadCase{"addr_missing", with(kTorchrun, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set"}},
        BadCase{"port_missing", with(kTorchrun, {{"MASTER_PORT", ""}}), {"MASTER_PORT is not set"}},
        BadCase{"port_too_big", with(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT", "'70000'"}},
        BadCase{
            "ompi_size_missing", with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", ""}}), {"OMPI_COMM_WORLD_SIZE is not set"}},
        BadCase{"pmi_local_missing", with(kHydra, {{"MPI_LOCALNRANKS", ""}}), {"MPI_LOCALNRANKS is not set"}},
        BadCase{"slurm_list", with(kSlurm, {{"SLURM_STEP_NODELIST", "gpu[08"}}), {"SLURM_STEP_NODELIST", "'gpu[08'"}},
        BadCase{"slurm_tasks",
                with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "4(3)"}}),
                {"SLURM_STEP_TASKS_PER_NODE", "'4(3)'"}},
        BadCase{"slurm_few_nodes",
                with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}}),
                {"SLURM_STEP_TASKS_PER_NODE", "node 2"}},
        BadCase{"slurm_local", with(kSlurm, {{"SLURM_LOCALID", "4"}}), {"SLURM_LOCALID", "'4'"}}),
    [](const auto& info) { return info.param.name; });

TEST(RankEnv, SetByHandOnOneHostWithoutLocalSizeThenAccepted) {
  const auto env = detect(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "5000"}});
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node_rank, 0);
}

TEST(Slurm, FirstHostOfCompressedLists) {
  EXPECT_EQ(slurm::first_host("node[01-04,7]", "V"), "node01");
  EXPECT_EQ(slurm::first_host("node7", "V"), "node7");
  EXPECT_EQ(slurm::first_host("a,b[1-2]", "V"), "a");
  EXPECT_EQ(slurm::first_host("rack[2-3]n[05,06].site,z", "V"), "rack2n05.site");
  EXPECT_THROW((void)slurm::first_host("", "V"), ConfigError);
  EXPECT_THROW((void)slurm::first_host("n[]", "V"), ConfigError);
}

TEST(Slurm, TasksOnEachNode) {
  const int expected[] = {8, 8, 4, 2};
  for (int node = 0; node < 4; ++node) EXPECT_EQ(slurm::tasks_on_node("8(x2),4,2", node, "V"), expected[node]);
  EXPECT_THROW((void)slurm::tasks_on_node("8(x2)", 2, "V"), ConfigError);
  EXPECT_THROW((void)slurm::tasks_on_node("0", 0, "V"), ConfigError);
}

}  // namespace
}  // namespace fsdpp

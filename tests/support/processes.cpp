#include "support/processes.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "comm/socket.h"

namespace fsdpp::test {
namespace {

using Clock = std::chrono::steady_clock;

const char* const kOfLaunchers[] = {
    "RANK",        "WORLD_SIZE",  "LOCAL_RANK",   "LOCAL_WORLD_SIZE",           "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "FSDPP_RUN",    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
    "PMI_RANK",    "PMI_SIZE",    "SLURM_PROCID", "TORCHELASTIC_ERROR_FILE"};

Environment inherited() {
  Environment result;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const size_t cut = text.find('=');
    if (cut != std::string::npos) result[text.substr(0, cut)] = text.substr(cut + 1);
  }
  for (const char* name : kOfLaunchers) result.erase(name);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

pid_t start(std::vector<std::string> command, const Environment& added, const std::string& output) {
  Environment all = inherited();
  for (const auto& [name, value] : added) {
    if (value.empty())
      all.erase(name);
    else
      all[name] = value;
  }
  std::vector<std::string> lines;
  for (const auto& [name, value] : all) lines.push_back(name + "=" + value);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, command[0].c_str(), &actions, nullptr, pointers(command).data(), pointers(lines).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("can't start " + command[0]);
  return pid;
}

ProcessResult wait_for(pid_t pid, Clock::time_point deadline) {
  ProcessResult result;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() >= deadline) {
      result.late = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

std::string content(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  ::unlink(path.c_str());
  return text.str();
}

}  // namespace

std::vector<ProcessResult> run_processes(const std::vector<std::string>& command,
                                         const std::vector<Environment>& environments,
                                         std::chrono::milliseconds limit) {
  char folder[] = "/tmp/fsdpp-test-XXXXXX";
  if (::mkdtemp(folder) == nullptr) throw std::runtime_error("can't make a folder in /tmp");
  const auto path = [&](size_t i) { return std::string(folder) + "/" + std::to_string(i); };
  const auto deadline = Clock::now() + limit;
  std::vector<pid_t> pids;
  for (size_t i = 0; i < environments.size(); ++i) pids.push_back(start(command, environments[i], path(i)));
  std::vector<ProcessResult> results;
  for (const pid_t pid : pids) results.push_back(wait_for(pid, deadline));
  for (size_t i = 0; i < results.size(); ++i) results[i].output = content(path(i));
  ::rmdir(folder);
  return results;
}

std::vector<Environment> rank_environments(int size, int port) {
  std::vector<Environment> result;
  for (int rank = 0; rank < size; ++rank)
    result.push_back({{"RANK", std::to_string(rank)},
                      {"WORLD_SIZE", std::to_string(size)},
                      {"LOCAL_RANK", std::to_string(rank)},
                      {"LOCAL_WORLD_SIZE", std::to_string(size)},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)},
                      {"OMP_NUM_THREADS", "1"}});
  return result;
}

int free_port() { return comm::port_of(comm::listen_tcp(0)); }

}  // namespace fsdpp::test

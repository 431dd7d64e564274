#include "run_program.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fsdpp::launcher::testing {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void redirect(const std::string& path, int target) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(fd, target);
  ::close(fd);
}

}  // namespace

RunningProgram::RunningProgram(const std::vector<std::string>& arguments,
                               const std::vector<std::string>& extra_environment)
    : start_(std::chrono::steady_clock::now()) {
  std::string pattern = (std::filesystem::temp_directory_path() / "fsdpp-launcher-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  folder_ = pattern;
  std::vector<char*> argv{const_cast<char*>(FSDPP_RUN_PATH)};
  for (const auto& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ != 0) return;
  ::setpgid(0, 0);
  redirect(folder_ + "/out", STDOUT_FILENO);
  redirect(folder_ + "/err", STDERR_FILENO);
  for (const auto& entry : extra_environment) ::putenv(const_cast<char*>(entry.c_str()));
  ::execv(FSDPP_RUN_PATH, argv.data());
  ::_exit(126);
}

RunningProgram::~RunningProgram() {
  if (pid_ > 0) {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string RunningProgram::out() const { return read_file(folder_ + "/out"); }

bool RunningProgram::wait_for_output(const std::string& text) const {
  for (int i = 0; i < 2000; ++i) {
    if (out().find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

Outcome RunningProgram::wait() {
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  Outcome result;
  result.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result.out = read_file(folder_ + "/out");
  result.err = read_file(folder_ + "/err");
  result.duration = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start_);
  return result;
}

Outcome run(const std::vector<std::string>& arguments, const std::vector<std::string>& extra_environment) {
  return RunningProgram(arguments, extra_environment).wait();
}

Outcome run_script(int ranks, const std::string& script, const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = {"--nproc-per-node", std::to_string(ranks)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  for (const char* a : {"--", "/bin/sh", "-c"}) arguments.emplace_back(a);
  arguments.push_back(script);
  return run(arguments);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

bool is_alive(pid_t pid) {
  const auto stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const auto state = stat.rfind(')');
  return state != std::string::npos && stat.size() > state + 2 && stat[state + 2] != 'Z';
}

}  // namespace fsdpp::launcher::testing

#include "launcher/failure.h"

#include <string.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <tuple>

namespace fsdpp::launcher {
namespace {

std::string message_in(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return text;
  const auto& message = json["message"];
  if (message.is_string()) return message.get<std::string>();
  if (message.is_object() && message.contains("message") && message["message"].is_string())
    return message["message"].get<std::string>();
  return text;
}

}  // namespace

std::string describe(const RankEnd& end) {
  if (end.signal == 0) return "exit code " + std::to_string(end.exit_code);
  const char* name = ::sigabbrev_np(end.signal);
  return "signal " + std::to_string(end.signal) + (name != nullptr ? " (SIG" + std::string(name) + ")" : "");
}

bool is_earlier(const RankEnd& a, const RankEnd& b) {
  return std::tuple(a.signal == 0, a.message_time_ns, a.rank) < std::tuple(b.signal == 0, b.message_time_ns, b.rank);
}

std::optional<ErrorMessage> read_error_file(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || info.st_size == 0) return std::nullopt;
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return ErrorMessage{message_in(text), info.st_mtim.tv_sec * 1'000'000'000LL + info.st_mtim.tv_nsec};
}

}  // namespace fsdpp::launcher

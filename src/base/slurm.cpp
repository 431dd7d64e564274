#include "base/slurm.h"

#include <charconv>
#include <optional>

#include "base/enforce.h"

namespace fsdpp::slurm {
namespace {

std::optional<int> to_int(std::string_view text) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1) return std::nullopt;
  return value;
}

// Splits "8(x2)" into {8, 2} and "4" into {4, 1}.
std::optional<std::pair<int, int>> count_and_repeat(std::string_view part) {
  const auto open = part.find("(x");
  const auto count = to_int(part.substr(0, open));
  if (open == std::string_view::npos) return count ? std::optional(std::pair(*count, 1)) : std::nullopt;
  if (!part.ends_with(')')) return std::nullopt;
  const auto repeat = to_int(part.substr(open + 2, part.size() - open - 3));
  return count && repeat ? std::optional(std::pair(*count, *repeat)) : std::nullopt;
}

}  // namespace

std::string first_host(std::string_view node_list, const char* variable) {
  std::string host;
  for (auto rest = node_list; !rest.empty() && rest.front() != ',';) {
    if (rest.front() != '[') {
      host += rest.front();
      rest.remove_prefix(1);
      continue;
    }
    const auto close = rest.find(']');
    const auto first = rest.substr(1, rest.find_first_of("-,]") - 1);
    FSDPP_ENFORCE(close != std::string_view::npos && !first.empty(), ConfigError,
                  "environment variable {}: expected a host list such as node[01-04,7], got '{}'", variable, node_list);
    host += first;
    rest.remove_prefix(close + 1);
  }
  FSDPP_ENFORCE(!host.empty(), ConfigError,
                "environment variable {}: expected a host list such as node[01-04,7], got '{}'", variable, node_list);
  return host;
}

int tasks_on_node(std::string_view tasks_per_node, int node, const char* variable) {
  int left = node;
  for (auto rest = tasks_per_node; !rest.empty();) {
    const auto comma = rest.find(',');
    const auto part = count_and_repeat(rest.substr(0, comma));
    FSDPP_ENFORCE(part, ConfigError, "environment variable {}: expected task counts such as 8(x2),4, got '{}'",
                  variable, tasks_per_node);
    if (left < part->second) return part->first;
    left -= part->second;
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  fail<ConfigError>("environment variable {}: expected a count for node {}, got '{}'", variable, node, tasks_per_node);
}

}  // namespace fsdpp::slurm

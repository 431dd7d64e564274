#include "comm/window_support.h"

#include <fmt/format.h>

#include <fstream>
#include <functional>
#include <mutex>
#include <set>

#include "base/env.h"
#include "comm/socket.h"
#include "fsdpp/base/log.h"

namespace fsdpp::comm {
namespace {

std::optional<std::string> bar_text(WindowBar bar) {
  switch (bar) {
    case WindowBar::WindowsOff:
      return "has NCCL_WIN_ENABLE=0";
    case WindowBar::VirtualMemoryOff:
      return "has NCCL_CUMEM_ENABLE=0";
    case WindowBar::OldDriver:
      return "has a CUDA driver older than 12.0";
    case WindowBar::None:
      break;
  }
  return std::nullopt;
}

}  // namespace

int64_t window_host() {
  std::string id = env::get("NCCL_HOSTID").value_or("");
  if (id.empty()) {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    id = host_name() + "/" + boot;
  }
  return static_cast<int64_t>(std::hash<std::string>{}(id));
}

WindowBar window_bar_of_environment() {
  if (env::get("NCCL_WIN_ENABLE") == "0") return WindowBar::WindowsOff;
  if (env::get("NCCL_CUMEM_ENABLE") == "0") return WindowBar::VirtualMemoryOff;
  return WindowBar::None;
}

std::optional<std::string> windows_refused(std::span<const WindowFacts> facts, const std::vector<int>& ranks) {
  for (size_t i = 0; i < facts.size(); ++i)
    if (const auto text = bar_text(facts[i].bar)) return fmt::format("rank {} {}", ranks[i], *text);
  for (size_t i = 1; i < facts.size(); ++i)
    if (facts[i].host != facts[0].host)
      return fmt::format("ranks {} and {} are on different hosts", ranks[0], ranks[i]);
  for (size_t i = 0; i < facts.size(); ++i)
    for (size_t k = i + 1; k < facts.size(); ++k)
      if (facts[i].gpu == facts[k].gpu) return fmt::format("ranks {} and {} share a GPU", ranks[i], ranks[k]);
  for (size_t i = 0; i < facts.size(); ++i)
    if (const int64_t peer = facts[i].unreachable; peer >= 0)
      return fmt::format("the GPU of rank {} has no peer access to that of rank {}, or does not see it (CUDA_VISIBLE_DEVICES)", ranks[i],
                         ranks[static_cast<size_t>(peer)]);
  return std::nullopt;
}

void warn_plain_buffers(const std::string& communicator, const std::string& reason) {
  static std::mutex mutex;
  static auto* told = new std::set<std::string>;
  std::lock_guard lock(mutex);
  if (!told->insert(reason).second) return;
  log::warn(fmt::format("symmetric buffers: plain memory is used in their place (communicator '{}' and others like it): {}", communicator,
                        reason));
}

}  // namespace fsdpp::comm

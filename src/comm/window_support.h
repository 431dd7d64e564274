#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// Whether the ranks of a communicator can register symmetric memory. NCCL 2.28 does not say: its call succeeds without, too.
namespace fsdpp::comm {

enum class WindowBar : int64_t { None, WindowsOff, VirtualMemoryOff, OldDriver };

/// What one rank knows; numbers only, so that ranks can exchange them.
struct WindowFacts {
  int64_t host = 0;  ///< equal for ranks of one host
  int64_t gpu = 0;   ///< its place on the host's bus
  WindowBar bar = WindowBar::None;
  int64_t unreachable = -1;  ///< index of the first member whose GPU this rank's can't access
};

/// This host's number: NCCL_HOSTID if set, as NCCL takes it, else of its name and boot.
[[nodiscard]] int64_t window_host();
/// What the environment forbids.
[[nodiscard]] WindowBar window_bar_of_environment();
/// Why not, for a log line; nothing where it can. `facts` and `ranks` (world ranks) by member.
[[nodiscard]] std::optional<std::string> windows_refused(std::span<const WindowFacts> facts, const std::vector<int>& ranks);
/// Warns that `communicator` hands out plain memory, once in a process for each reason.
void warn_plain_buffers(const std::string& communicator, const std::string& reason);

}  // namespace fsdpp::comm

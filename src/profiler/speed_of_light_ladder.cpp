#include <fmt/format.h>

#include <algorithm>

#include "fsdpp/profiler/speed_of_light.h"

namespace fsdpp::profiler {

const char* to_string(Source source) noexcept {
  static constexpr const char* kNames[] = {"measured (range profiler)", "sampled (PM sampling)",
                                           "modelled (FLOPs and bytes of the operator)", "time only"};
  return kNames[static_cast<int>(source)];
}

LadderChoice choose_source(std::span<const Rung> rungs) {
  LadderChoice out;
  for (const Rung& r : rungs) {
    if (r.usable) out.source = std::min(out.source, r.source);
  }
  out.text = fmt::format("speed of light: {}", to_string(out.source));
  std::vector<Rung> refused;
  for (const Rung& r : rungs) {
    if (!r.usable && r.source < out.source) refused.push_back(r);
  }
  std::stable_sort(refused.begin(), refused.end(), [](auto& a, auto& b) { return a.source < b.source; });
  for (const Rung& r : refused) out.text += fmt::format("; not {}: {}", to_string(r.source), r.reason);
  return out;
}

namespace {

std::string admin_only_line(const std::string& driver_params) {
  const size_t at = driver_params.find("RmProfilingAdminOnly");
  if (at == std::string::npos) return "";
  return " The driver says: '" + driver_params.substr(at, driver_params.find('\n', at) - at) + "'.";
}

}  // namespace

std::string explain_counter_error(int cupti_result, const std::string& driver_params) {
  switch (cupti_result) {
    case 35:
      return "INSUFFICIENT_PRIVILEGES (35): counters are for administrators." + admin_only_line(driver_params) +
             " Try: load the driver with NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN; "
             "tracing works without.";
    case 26:
      return "HARDWARE_BUSY (26): another tool holds the performance monitors. Try: dcgmi profile --pause.";
    case 33:
    case 40:
      return fmt::format("VIRTUALIZED_DEVICE ({}): the hypervisor hides the counters.", cupti_result);
    case 41:
      return "CONFIDENTIAL_COMPUTING (41): counters are off in this mode.";
    case 43:
      return "MIG (43): this counter is not available on a MIG slice.";
    case 999:
      return "UNKNOWN (999): no usable GPU or driver.";
    default:
      return fmt::format("CUPTI error {}.", cupti_result);
  }
}

CounterPlan plan_counters(const CounterRequest& r) {
  if (r.passes <= 0) return {false, 0, false, fmt::format("metric set {} can't be collected on this chip", r.set)};
  const bool communicates = r.collectives > 0 && r.world_size > 1;
  if (!r.replay_steps && r.passes > 1 && communicates) {
    return {false, 0, false,
            fmt::format("metric set {} needs {} passes: replaying kernels would replay {} collectives, which peers "
                        "don't replay and "
                        "whose buffers are not restored. Try: one pass per step on all ranks, or set V1 (one pass).",
                        r.set, r.passes, r.collectives)};
  }
  return {true, r.replay_steps ? r.passes : 1, true, ""};
}

}  // namespace fsdpp::profiler

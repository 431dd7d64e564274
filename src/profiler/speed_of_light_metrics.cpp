#include "profiler/speed_of_light_metrics.h"

namespace fsdpp::profiler {
namespace {

constexpr const char* kSmActive = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed";

std::vector<std::string> pm_core() {
  return {kSmActive, metric::kTensor, metric::kGpuDram, metric::kDramBytes, metric::kIssue, metric::kTime};
}

MetricSet triage(std::string_view chip) {
  if (!chip.starts_with("GH") && !chip.starts_with("GB")) return {"V2", {}, 0, 0};
  const char* dram = chip.starts_with("GB") ? metric::kTriageDramGb : metric::kTriageDramGh;
  return {
      "V2", {metric::kTriageSm, metric::kTriageL1, metric::kTriageL2, dram, metric::kDramBytes, metric::kTime}, 2, 1};
}

MetricSet link(std::string_view chip) {
  MetricSet set{"PM-link", pm_core(), 0, 1};
  if (!chip.starts_with("AD")) {  // these have no NVLink
    set.metrics.insert(set.metrics.end(), {"nvltx__bytes.sum", "nvlrx__bytes.sum"});
  }
  set.metrics.insert(set.metrics.end(), {"pcie__read_bytes.sum", "pcie__write_bytes.sum"});
  return set;
}

MetricSet fp32() {
  MetricSet set{"R-fp32", {}, 1, 0};  // bytes and time come with V1: together they take two passes
  for (const char* op : {"fadd", "fmul", "ffma"}) {
    set.metrics.push_back("smsp__sass_thread_inst_executed_op_" + std::string(op) + "_pred_on.sum");
  }
  return set;
}

}  // namespace

MetricSet metric_set(std::string_view name, std::string_view chip) {
  if (name == "V1") {
    return {"V1",
            {metric::kTime, "sm__cycles_elapsed.max", "sm__cycles_active.avg", metric::kTensor, metric::kIssue,
             metric::kDram, metric::kDramRead, metric::kDramWrite, metric::kL2Bytes, metric::kWarps},
            1,
            2};
  }
  if (name == "V1-PM") return {"V1-PM", pm_core(), 1, 1};
  if (name == "V2") return triage(chip);
  if (name == "PM-link") return link(chip);
  if (name == "R-bf16") return {"R-bf16", {metric::kBf16Ops, metric::kDramBytes, metric::kTime}, 1, 0};
  if (name == "R-fp32") return fp32();
  return {std::string(name), {}, 0, 0};
}

}  // namespace fsdpp::profiler

#pragma once
#include <string>
#include <string_view>
#include <vector>

/// Names of hardware metrics by chip. Pass counts are those of CUPTI 13.0 without an availability image; the tests
/// compare them with the Profiler Host API.
namespace fsdpp::profiler {

struct MetricSet {
  std::string name;
  std::vector<std::string> metrics;
  int range_passes = 0;  ///< 0: refused by the range profiler
  int pm_passes = 0;     ///< 0: refused by PM sampling
};

/// "V1" (verdict), "V1-PM", "V2" (triage), "PM-link", "R-bf16" (roofline), "R-fp32". Empty metrics: the chip lacks it.
[[nodiscard]] MetricSet metric_set(std::string_view name, std::string_view chip);

namespace metric {
inline constexpr const char* kTime = "gpu__time_duration.sum";
inline constexpr const char* kTensor = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kIssue = "sm__inst_executed.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kDram = "dram__throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kGpuDram = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kDramRead = "dram__bytes_read.sum";
inline constexpr const char* kDramWrite = "dram__bytes_write.sum";
inline constexpr const char* kDramBytes = "dram__bytes.sum";
inline constexpr const char* kL2Bytes = "lts__t_bytes.sum";
inline constexpr const char* kWarps = "sm__warps_active.avg.pct_of_peak_sustained_active";
inline constexpr const char* kBf16Ops = "sm__ops_path_tensor_src_bf16_dst_fp32.sum";
inline constexpr const char* kTriageSm = "TriageCompute.sm__throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kTriageL1 = "SM_A.TriageCompute.l1tex__throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kTriageL2 = "LTS.TriageCompute.lts__throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kTriageDramGh = "FBSP.TriageCompute.dramc__throughput.avg.pct_of_peak_sustained_elapsed";
inline constexpr const char* kTriageDramGb = "FBSP.TriageCompute.dram__throughput.avg.pct_of_peak_sustained_elapsed";
}  // namespace metric

}  // namespace fsdpp::profiler

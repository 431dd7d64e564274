#include "base/enforce.h"
#include "fsdpp/profiler/counters.h"

namespace fsdpp::profiler {
namespace {

constexpr const char* kReason =
    "fsdpp was built without CUPTI's headers. Try: a LibTorch of PyPI's wheels, which lie beside it.";

}  // namespace

std::unique_ptr<MetricTable> open_metric_table(const std::string&, CounterKind, const std::string&) {
  fail<ConfigError>("counters: {}", kReason);
}
std::vector<std::string> counter_chips(const std::string&) { fail<ConfigError>("counters: {}", kReason); }
std::vector<Rung> probe_counters(int, const std::string&) {
  return {{Source::Measured, false, kReason}, {Source::Sampled, false, kReason}};
}
std::unique_ptr<RangeCounters> open_range_counters(int, CounterRequest, int, const std::string&) {
  fail<ConfigError>("counters: {}", kReason);
}
std::unique_ptr<PmSampler> open_pm_sampler(int, const std::string&, int64_t, int64_t, const std::string&) {
  fail<ConfigError>("counters: {}", kReason);
}

}  // namespace fsdpp::profiler

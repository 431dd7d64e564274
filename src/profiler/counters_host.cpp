#include <dlfcn.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "base/enforce.h"
#include "fsdpp/base/log.h"
#include "profiler/counters_api.h"

namespace fsdpp::profiler {
namespace {

void* open_library(const std::string& library) {
  const std::string name = library.empty() ? "libcupti.so.13" : library;
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    fail<ConfigError>("counters: expected CUPTI 13 as {}, got: {}. Try: install nvidia-cuda-cupti beside LibTorch.",
                      name, dlerror());
  }
  return handle;
}

/// CUPTI opens this library by its bare name, which may find another version's. Once the one beside CUPTI is loaded the name is its.
void load_neighbour(void* cupti) {
  Dl_info info{};
  if (dladdr(dlsym(cupti, "cuptiProfilerHostInitialize"), &info) == 0 || info.dli_fname == nullptr) return;
  const std::filesystem::path file = std::filesystem::path(info.dli_fname).parent_path() / "libnvperf_host.so";
  static_cast<void>(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL));  // without it CUPTI searches, and says if it finds none
}

CuptiApi look_up(const std::string& library) {
  void* handle = open_library(library);
  load_neighbour(handle);
  CuptiApi api;
  const auto find = [&](const char* name) {
    void* symbol = dlsym(handle, name);
    FSDPP_ENFORCE(symbol != nullptr, ConfigError,
                  "counters: expected {} in CUPTI, got nothing. Try: CUPTI of CUDA 13.0 or newer.", name);
    return symbol;
  };
#define FSDPP_CUPTI_FIND(name) api.name = reinterpret_cast<decltype(api.name)>(find(#name));
  FSDPP_CUPTI_FUNCTIONS(FSDPP_CUPTI_FIND)
#undef FSDPP_CUPTI_FIND
  return api;
}

class HostTable final : public MetricTable {
 public:
  HostTable(const CuptiApi& api, std::string chip, CounterKind kind)
      : api_(api), chip_(std::move(chip)), kind_(kind), host_(api, kind, chip_, {}) {}

  bool has(const std::string& metric) const override {
    FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetMetricProperties_Params, p);
    p.pHostObject = host_.get();
    p.pMetricName = metric.c_str();
    return api_.cuptiProfilerHostGetMetricProperties(&p) == CUPTI_SUCCESS;
  }
  int passes(const std::vector<std::string>& metrics) const override {
    HostConfig config(api_, kind_, chip_, {});
    return config.configure(metrics) == CUPTI_SUCCESS ? config.passes() : 0;
  }
  int64_t size() const override {
    int64_t sum = 0;
    for (const CUpti_MetricType type :
         {CUPTI_METRIC_TYPE_COUNTER, CUPTI_METRIC_TYPE_RATIO, CUPTI_METRIC_TYPE_THROUGHPUT}) {
      FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetBaseMetrics_Params, p);
      p.pHostObject = host_.get();
      p.metricType = type;
      check_cupti(api_.cuptiProfilerHostGetBaseMetrics(&p), "list of metrics");
      sum += static_cast<int64_t>(p.numMetrics);
    }
    return sum;
  }

 private:
  const CuptiApi& api_;
  std::string chip_;
  CounterKind kind_;
  HostConfig host_;
};

}  // namespace

const CuptiApi& CuptiApi::load(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, CuptiApi> loaded;
  const std::scoped_lock lock(mutex);
  const auto it = loaded.find(library);
  return it != loaded.end() ? it->second : loaded.emplace(library, look_up(library)).first->second;
}

std::string driver_params() {
  std::ifstream file("/proc/driver/nvidia/params");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void check_cupti(CUptiResult result, const char* what) {
  log::debug(fmt::format("counters: {}: CUPTI returned {}", what, static_cast<int>(result)));
  FSDPP_ENFORCE(result == CUPTI_SUCCESS, ConfigError, "counters: {} failed: {}", what,
                explain_counter_error(static_cast<int>(result), driver_params()));
}

void check_given(const void* given, const char* what) {
  FSDPP_ENFORCE(given != nullptr, ConfigError, "counters: expected {} of CUPTI, got none. Try: another version of CUPTI.", what);
}

std::vector<const char*> pointers(const std::vector<std::string>& names) {
  std::vector<const char*> out;
  for (const std::string& name : names) out.push_back(name.c_str());
  return out;
}

HostConfig::HostConfig(const CuptiApi& api, CounterKind kind, std::string chip, Bytes availability)
    : api_(api), chip_(std::move(chip)), availability_(std::move(availability)) {
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_Initialize_Params, p);
  p.profilerType = kind == CounterKind::Range ? CUPTI_PROFILER_TYPE_RANGE_PROFILER : CUPTI_PROFILER_TYPE_PM_SAMPLING;
  p.pChipName = chip_.c_str();
  p.pCounterAvailabilityImage = availability_.empty() ? nullptr : availability_.data();
  const CUptiResult result = api_.cuptiProfilerHostInitialize(&p);
  FSDPP_ENFORCE(result == CUPTI_SUCCESS, ConfigError,
                "counters: expected a chip that CUPTI knows, got '{}' (CUPTI error {}).", chip_,
                static_cast<int>(result));
  check_given(p.pHostObject, "a host object");
  object_ = p.pHostObject;
}

HostConfig::~HostConfig() {
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_Deinitialize_Params, p);
  p.pHostObject = object_;
  api_.cuptiProfilerHostDeinitialize(&p);
}

CUptiResult HostConfig::configure(const std::vector<std::string>& metrics) {
  auto names = pointers(metrics);
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_ConfigAddMetrics_Params, add);
  add.pHostObject = object_;
  add.ppMetricNames = names.data();
  add.numMetrics = names.size();
  if (const CUptiResult r = api_.cuptiProfilerHostConfigAddMetrics(&add); r != CUPTI_SUCCESS) return r;
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImageSize_Params, size);
  size.pHostObject = object_;
  if (const CUptiResult r = api_.cuptiProfilerHostGetConfigImageSize(&size); r != CUPTI_SUCCESS) return r;
  image_.resize(size.configImageSize);
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImage_Params, image);
  image.pHostObject = object_;
  image.configImageSize = image_.size();
  image.pConfigImage = image_.data();
  if (const CUptiResult r = api_.cuptiProfilerHostGetConfigImage(&image); r != CUPTI_SUCCESS) return r;
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetNumOfPasses_Params, passes);
  passes.configImageSize = image_.size();
  passes.pConfigImage = image_.data();
  const CUptiResult result = api_.cuptiProfilerHostGetNumOfPasses(&passes);
  passes_ = static_cast<int>(passes.numOfPasses);
  return result;
}

CounterValues HostConfig::evaluate(const Bytes& data, size_t index, const std::vector<std::string>& metrics) const {
  auto names = pointers(metrics);
  std::vector<double> values(names.size());
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues_Params, p);
  p.pHostObject = object_;
  p.pCounterDataImage = data.data();
  p.counterDataImageSize = data.size();
  p.rangeIndex = index;
  p.ppMetricNames = names.data();
  p.numMetrics = names.size();
  p.pMetricValues = values.data();
  check_cupti(api_.cuptiProfilerHostEvaluateToGpuValues(&p), "evaluation");
  CounterValues out;
  for (size_t i = 0; i < metrics.size(); ++i)
    if (std::isfinite(values[i])) out[metrics[i]] = values[i];  // a share of nothing is not a number
  return out;
}

std::unique_ptr<MetricTable> open_metric_table(const std::string& chip, CounterKind kind, const std::string& library) {
  return std::make_unique<HostTable>(CuptiApi::load(library), chip, kind);
}

std::vector<std::string> counter_chips(const std::string& library) {
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Host_GetSupportedChips_Params, p);
  check_cupti(CuptiApi::load(library).cuptiProfilerHostGetSupportedChips(&p), "list of chips");
  return {p.ppChipNames, p.ppChipNames + p.numChips};
}

}  // namespace fsdpp::profiler

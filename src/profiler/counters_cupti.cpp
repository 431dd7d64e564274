#include "fsdpp/profiler/counters.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/enforce.h"
#include "profiler/counters_api.h"
#include "profiler/speed_of_light_metrics.h"

namespace fsdpp::profiler {
namespace {

MetricSet checked_set(const std::string& name, const std::string& chip) {
  MetricSet set = metric_set(name, chip);
  FSDPP_ENFORCE(!set.metrics.empty(), ConfigError, "counters: expected a metric set of {}, got '{}'. Try: V1.", chip,
                name);
  return set;
}

class CuptiRangeCounters final : public RangeCounters {
 public:
  CuptiRangeCounters(const CuptiApi& api, int device, CounterRequest request, int max_kernels)
      : api_(api),
        context_(current_context()),
        chip_(chip_of(api, device, CounterKind::Range)),
        metrics_(checked_set(request.set, chip_).metrics),
        host_(api, CounterKind::Range, chip_, range_availability(api, context_)) {
    check_cupti(host_.configure(metrics_), "configuration of the range profiler");
    request.passes = host_.passes();
    request.replay_steps = true;
    const CounterPlan plan = plan_counters(request);
    FSDPP_ENFORCE(plan.allowed, UsageError, "counters: {}", plan.reason);
    enable();
    try {
      make_data(static_cast<size_t>(max_kernels));
      configure(static_cast<size_t>(max_kernels));
    } catch (...) {
      disable();
      throw;
    }
  }
  ~CuptiRangeCounters() override { disable(); }

  void begin_step() override {
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_Start_Params, p);
    p.pRangeProfilerObject = object_;
    check_cupti(api_.cuptiRangeProfilerStart(&p), "start of the range profiler");
    started_ = true;
  }
  bool end_step() override {
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_Stop_Params, p);
    p.pRangeProfilerObject = object_;
    FSDPP_ENFORCE(std::exchange(started_, false), UsageError, "counters: expected a step that began, got none");
    check_cupti(api_.cuptiRangeProfilerStop(&p), "stop of the range profiler");
    return p.isAllPassSubmitted != 0;
  }
  std::vector<CounterValues> ranges() override {
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_DecodeData_Params, decode);
    decode.pRangeProfilerObject = object_;
    check_cupti(api_.cuptiRangeProfilerDecodeData(&decode), "decoding");
    dropped_ = static_cast<int64_t>(decode.numOfRangeDropped);
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataInfo_Params, info);
    info.pCounterDataImage = data_.data();
    info.counterDataImageSize = data_.size();
    check_cupti(api_.cuptiRangeProfilerGetCounterDataInfo(&info), "count of ranges");
    std::vector<CounterValues> out;
    for (size_t i = 0; i < info.numTotalRanges; ++i) out.push_back(host_.evaluate(data_, i, metrics_));
    return out;
  }
  int64_t dropped() const override { return dropped_; }

 private:
  void enable() {
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_Enable_Params, p);
    p.ctx = context_;
    check_cupti(api_.cuptiRangeProfilerEnable(&p), "range profiler");
    check_given(p.pRangeProfilerObject, "a range profiler");
    object_ = p.pRangeProfilerObject;
  }
  void disable() noexcept {
    if (started_) {  // a step that did not end
      FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_Stop_Params, p);
      p.pRangeProfilerObject = object_;
      api_.cuptiRangeProfilerStop(&p);
    }
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_Disable_Params, p);
    p.pRangeProfilerObject = object_;
    api_.cuptiRangeProfilerDisable(&p);
  }
  void make_data(size_t ranges) {
    auto names = pointers(metrics_);
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataSize_Params, size);
    size.pRangeProfilerObject = object_;
    size.pMetricNames = names.data();
    size.numMetrics = names.size();
    size.maxNumOfRanges = ranges;
    size.maxNumRangeTreeNodes = static_cast<uint32_t>(ranges);
    check_cupti(api_.cuptiRangeProfilerGetCounterDataSize(&size), "size of the counter data");
    data_.resize(size.counterDataSize);
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_CounterDataImage_Initialize_Params, init);
    init.pRangeProfilerObject = object_;
    init.counterDataSize = data_.size();
    init.pCounterData = data_.data();
    check_cupti(api_.cuptiRangeProfilerCounterDataImageInitialize(&init), "counter data");
  }
  void configure(size_t ranges) {
    FSDPP_CUPTI_PARAMS(CUpti_RangeProfiler_SetConfig_Params, p);
    p.pRangeProfilerObject = object_;
    p.configSize = host_.image().size();
    p.pConfig = host_.image().data();
    p.counterDataImageSize = data_.size();
    p.pCounterDataImage = data_.data();
    p.range = CUPTI_AutoRange;
    p.replayMode = CUPTI_UserReplay;
    p.maxRangesPerPass = ranges;
    p.numNestingLevels = 1;
    p.minNestingLevel = 1;
    p.targetNestingLevel = 1;
    check_cupti(api_.cuptiRangeProfilerSetConfig(&p), "settings of the range profiler");
  }

  const CuptiApi& api_;
  CUcontext context_;
  std::string chip_;
  std::vector<std::string> metrics_;
  HostConfig host_;
  CUpti_RangeProfiler_Object* object_ = nullptr;
  Bytes data_;
  int64_t dropped_ = 0;
  bool started_ = false;
};

/// Decodes on its own thread, so that the hardware's buffer does not run over.
class CuptiPmSampler final : public PmSampler {
 public:
  CuptiPmSampler(const CuptiApi& api, int device, const std::string& set, int64_t interval_ns, int64_t max_samples)
      : api_(api),
        chip_(chip_of(api, device, CounterKind::PmSampling)),
        metrics_(checked_set(set, chip_).metrics),
        host_(api, CounterKind::PmSampling, chip_, pm_availability(api, device)),
        max_samples_(max_samples) {
    check_cupti(host_.configure(metrics_), "configuration of PM sampling");
    FSDPP_ENFORCE(host_.passes() == 1, ConfigError,
                  "counters: PM sampling takes sets of one pass, {} has {}. Try: V1-PM.", set, host_.passes());
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_Enable_Params, p);
    p.deviceIndex = static_cast<size_t>(device);
    check_cupti(api_.cuptiPmSamplingEnable(&p), "PM sampling");
    check_given(p.pPmSamplingObject, "a sampler");
    object_ = p.pPmSamplingObject;
    try {
      configure(static_cast<uint64_t>(interval_ns));
      make_data();
    } catch (...) {
      disable();
      throw;
    }
  }
  ~CuptiPmSampler() override {
    if (decoder_.joinable()) end();
    disable();
  }

  void start() override {
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_Start_Params, p);
    p.pPmSamplingObject = object_;
    check_cupti(api_.cuptiPmSamplingStart(&p), "start of PM sampling");
    decoder_ = std::jthread([this](std::stop_token stopped) {
      while (!stopped.stop_requested()) {
        drain();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
  }
  std::vector<CounterSample> stop() override {
    end();
    FSDPP_ENFORCE(problem_.empty(), ConfigError, "{}", problem_);
    check_cupti(error_, "decoding of PM samples");
    if (!samples_.empty()) samples_.erase(samples_.begin());  // the first one covers time before the start
    return std::move(samples_);
  }
  bool overflowed() const override { return overflow_; }

 private:
  static constexpr uint32_t kSamplesPerDecode = 4096;

  void configure(uint64_t interval_ns) {
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_SetConfig_Params, p);
    p.pPmSamplingObject = object_;
    p.configSize = host_.image().size();
    p.pConfig = host_.image().data();
    p.hardwareBufferSize = size_t{256} << 20;
    p.samplingInterval = interval_ns;
    p.triggerMode = CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL;
    p.hwBufferAppendMode = CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_OLDEST;
    check_cupti(api_.cuptiPmSamplingSetConfig(&p), "settings of PM sampling");
  }
  void make_data() {
    auto names = pointers(metrics_);
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_GetCounterDataSize_Params, p);
    p.pPmSamplingObject = object_;
    p.pMetricNames = names.data();
    p.numMetrics = names.size();
    p.maxSamples = kSamplesPerDecode;
    check_cupti(api_.cuptiPmSamplingGetCounterDataSize(&p), "size of the samples");
    data_.resize(p.counterDataSize);
    check_cupti(clear(), "buffer of the samples");
  }
  CUptiResult clear() {
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_CounterDataImage_Initialize_Params, p);
    p.pPmSamplingObject = object_;
    p.counterDataSize = data_.size();
    p.pCounterData = data_.data();
    return api_.cuptiPmSamplingCounterDataImageInitialize(&p);
  }
  /// All that the hardware holds now. On the decoder's thread and in the destructor, so what goes wrong is noted.
  void drain() noexcept {
    try {
      if (problem_.empty()) decode();
    } catch (const std::exception& e) {
      problem_ = e.what();
    }
  }
  void decode() {
    for (bool more = true; more && error_ == CUPTI_SUCCESS;) {
      FSDPP_CUPTI_PARAMS(CUpti_PmSampling_DecodeData_Params, p);
      p.pPmSamplingObject = object_;
      p.pCounterDataImage = data_.data();
      p.counterDataImageSize = data_.size();
      error_ = api_.cuptiPmSamplingDecodeData(&p);
      if (error_ != CUPTI_SUCCESS) return;
      overflow_ = overflow_ || p.overflow != 0;
      more = p.decodeStopReason == CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL;
      read();
      error_ = clear();
    }
  }
  void read() {
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_GetCounterDataInfo_Params, info);
    info.pCounterDataImage = data_.data();
    info.counterDataImageSize = data_.size();
    error_ = api_.cuptiPmSamplingGetCounterDataInfo(&info);
    for (size_t i = 0; error_ == CUPTI_SUCCESS && i < info.numCompletedSamples; ++i) {
      if (std::ssize(samples_) >= max_samples_) {
        overflow_ = true;
        return;
      }
      FSDPP_CUPTI_PARAMS(CUpti_PmSampling_CounterData_GetSampleInfo_Params, p);
      p.pPmSamplingObject = object_;
      p.pCounterDataImage = data_.data();
      p.counterDataImageSize = data_.size();
      p.sampleIndex = i;
      error_ = api_.cuptiPmSamplingCounterDataGetSampleInfo(&p);
      if (error_ != CUPTI_SUCCESS) return;
      samples_.push_back({static_cast<int64_t>(p.startTimestamp), static_cast<int64_t>(p.endTimestamp),
                          host_.evaluate(data_, i, metrics_)});
    }
  }
  void end() {
    decoder_.request_stop();
    decoder_.join();
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_Stop_Params, p);
    p.pPmSamplingObject = object_;
    api_.cuptiPmSamplingStop(&p);
    drain();
  }
  void disable() noexcept {
    FSDPP_CUPTI_PARAMS(CUpti_PmSampling_Disable_Params, p);
    p.pPmSamplingObject = object_;
    api_.cuptiPmSamplingDisable(&p);
  }

  const CuptiApi& api_;
  std::string chip_;
  std::vector<std::string> metrics_;
  HostConfig host_;
  int64_t max_samples_;
  CUpti_PmSampling_Object* object_ = nullptr;
  Bytes data_;
  std::vector<CounterSample> samples_;  ///< the decoder's until it ended
  CUptiResult error_ = CUPTI_SUCCESS;
  std::string problem_;  ///< the decoder's too
  std::atomic<bool> overflow_ = false;
  std::jthread decoder_;
};

/// 1: unsupported, 2: disabled, 3: supported, 0: nobody knows.
std::string unsupported(const CUpti_Profiler_DeviceSupported_Params& s) {
  return fmt::format("expected a device whose counters CUPTI can read (3 each), got {}: architecture {}, SLI {}, vGPU {}, confidential "
                     "compute {}, mining processor {}, WSL {}. Try: the machine's own GPU, not a virtual one.",
                     static_cast<int>(s.isSupported), static_cast<int>(s.architecture), static_cast<int>(s.sli), static_cast<int>(s.vGpu),
                     static_cast<int>(s.confidentialCompute), static_cast<int>(s.cmp), static_cast<int>(s.wsl));
}

Rung probe(Source source, const std::function<void()>& open) {
  try {
    open();
    return {source, true, ""};
  } catch (const Error& e) {
    return {source, false, e.what()};
  }
}

}  // namespace

std::string chip_of(const CuptiApi& api, int device, CounterKind kind) {
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_Initialize_Params, init);
  check_cupti(api.cuptiProfilerInitialize(&init), "initialisation of CUPTI's profiling");
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_DeviceSupported_Params, support);
  support.cuDevice = device;
  support.api = kind == CounterKind::Range ? CUPTI_PROFILER_RANGE_PROFILING : CUPTI_PROFILER_PM_SAMPLING;
  check_cupti(api.cuptiProfilerDeviceSupported(&support), "support of the device");
  FSDPP_ENFORCE(support.isSupported == CUPTI_PROFILER_CONFIGURATION_SUPPORTED, ConfigError, "counters: {}", unsupported(support));
  FSDPP_CUPTI_PARAMS(CUpti_Device_GetChipName_Params, chip);
  chip.deviceIndex = static_cast<size_t>(device);
  check_cupti(api.cuptiDeviceGetChipName(&chip), "name of the chip");
  check_given(chip.pChipName, "the chip's name");
  return chip.pChipName;
}

CUcontext current_context() {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  auto* const get =
      driver == nullptr ? nullptr : reinterpret_cast<decltype(&cuCtxGetCurrent)>(dlsym(driver, "cuCtxGetCurrent"));
  CUcontext context = nullptr;
  const bool found = get != nullptr && get(&context) == CUDA_SUCCESS && context != nullptr;
  FSDPP_ENFORCE(found, ConfigError,
                "counters: expected a current CUDA context, got none. Try: use the device before counting.");
  return context;
}

Bytes range_availability(const CuptiApi& api, CUcontext context) {
  FSDPP_CUPTI_PARAMS(CUpti_Profiler_GetCounterAvailability_Params, p);
  p.ctx = context;
  check_cupti(api.cuptiProfilerGetCounterAvailability(&p), "availability of counters");
  Bytes image(p.counterAvailabilityImageSize);
  p.pCounterAvailabilityImage = image.data();
  check_cupti(api.cuptiProfilerGetCounterAvailability(&p), "availability of counters");
  return image;
}

Bytes pm_availability(const CuptiApi& api, int device) {
  FSDPP_CUPTI_PARAMS(CUpti_PmSampling_GetCounterAvailability_Params, p);
  p.deviceIndex = static_cast<size_t>(device);
  check_cupti(api.cuptiPmSamplingGetCounterAvailability(&p), "availability of PM sampling");
  Bytes image(p.counterAvailabilityImageSize);
  p.pCounterAvailabilityImage = image.data();
  check_cupti(api.cuptiPmSamplingGetCounterAvailability(&p), "availability of PM sampling");
  return image;
}

std::unique_ptr<RangeCounters> open_range_counters(int device, CounterRequest request, int max_kernels,
                                                   const std::string& library) {
  return std::make_unique<CuptiRangeCounters>(CuptiApi::load(library), device, std::move(request), max_kernels);
}

std::unique_ptr<PmSampler> open_pm_sampler(int device, const std::string& set, int64_t interval_ns, int64_t max_samples,
                                           const std::string& library) {
  return std::make_unique<CuptiPmSampler>(CuptiApi::load(library), device, set, interval_ns, max_samples);
}

std::vector<Rung> probe_counters(int device, const std::string& library) {
  return {probe(Source::Measured, [&] { static_cast<void>(open_range_counters(device, {}, 1, library)); }),
          probe(Source::Sampled, [&] { static_cast<void>(open_pm_sampler(device, "V1-PM", 1'000'000, 1, library)); })};
}

}  // namespace fsdpp::profiler

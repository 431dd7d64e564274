#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "profiler/buffer_pool.h"
#include "profiler/clock.h"
#include "profiler/cupti_library.h"
#include "profiler/decoder.h"
#include "profiler/device_source.h"
#include "profiler/host_log.h"

namespace fsdpp::profiler {
namespace {

constexpr size_t kReadyBuffers = 8;
constexpr std::array kKinds{CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,          CUPTI_ACTIVITY_KIND_MEMCPY2,
                            CUPTI_ACTIVITY_KIND_MEMSET,            CUPTI_ACTIVITY_KIND_RUNTIME,         CUPTI_ACTIVITY_KIND_OVERHEAD,
                            CUPTI_ACTIVITY_KIND_SYNCHRONIZATION,   CUPTI_ACTIVITY_KIND_CUDA_EVENT,      CUPTI_ACTIVITY_KIND_DRIVER};
/// Launches that do not pass through the runtime: NCCL, cuBLASLt. All other calls of the driver are left out.
constexpr std::array kDriverCalls{
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,  CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel, CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch,     CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz};
/// All launches of single kernels, the runtime's included: it launches through the driver.
constexpr std::array kLaunches{CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,   CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
                               CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
                               CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel, CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz};
/// Calls that are many and say nothing.
constexpr std::array kQuietCalls{CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020,         CUPTI_RUNTIME_TRACE_CBID_cudaSetDevice_v3020,
                                 CUPTI_RUNTIME_TRACE_CBID_cudaGetLastError_v3020,      CUPTI_RUNTIME_TRACE_CBID_cudaPeekAtLastError_v3020,
                                 CUPTI_RUNTIME_TRACE_CBID_cudaEventCreateWithFlags_v3020, CUPTI_RUNTIME_TRACE_CBID_cudaEventDestroy_v3020,
                                 CUPTI_RUNTIME_TRACE_CBID_cudaEventQuery_v3020};

/// The process's tie to CUPTI. Never destroyed: CUPTI's threads may call until the end.
class Cupti {
 public:
  static Cupti& get() {
    static auto* cupti = new Cupti;
    return *cupti;
  }

  const std::string& problem() const { return problem_; }
  void begin(int64_t buffer_bytes);
  DeviceRecords end();
  void leave_out_driver_calls();
  void synchronize();
  void log_launches(bool on);
  std::vector<std::string> logged_launches();

 private:
  Cupti();
  void subscribe();
  void check(CUptiResult result, const char* what);
  void check_clock();
  void drain(Decoder* decoder);
  void add_error(std::string text);

  static void CUPTIAPI requested(uint8_t** buffer, size_t* bytes, size_t* records);
  static void CUPTIAPI completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid);
  static void CUPTIAPI called_back(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data);
  void graph_node(CUpti_CallbackId id, const CUpti_GraphData& graph);
  void launched(const char* kernel);

  const CuptiLibrary& lib_ = CuptiLibrary::get();
  std::string problem_ = lib_.problem;
  std::atomic<BufferPool*> pool_{nullptr};
  std::mutex mutex_;
  std::vector<std::string> errors_;
  std::vector<GraphNode> nodes_;
  std::vector<std::string> launches_;
  CUpti_SubscriberHandle subscriber_ = nullptr;
};

Cupti::Cupti() {
  if (!problem_.empty()) return;
  subscribe();
  if (!problem_.empty()) return;
  check(lib_.cuptiSetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM), "cuptiSetThreadIdType");
  uint8_t zeroed = 1;
  size_t size = sizeof(zeroed);
  check(lib_.cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER, &size, &zeroed), "ZEROED_OUT_ACTIVITY_BUFFER");
  if (const CUptiResult r = lib_.cuptiActivityRegisterCallbacks(&Cupti::requested, &Cupti::completed); r != CUPTI_SUCCESS)
    problem_ = "cuptiActivityRegisterCallbacks: " + lib_.text(r);
}

void Cupti::subscribe() {
  std::array<char, 64> holder{};
  CUpti_SubscriberParams params{};
  params.structSize = CUpti_SubscriberParams_STRUCT_SIZE;
  params.subscriberName = "fsdpp";
  params.oldSubscriberName = holder.data();
  params.oldSubscriberSize = holder.size();
  const CUptiResult result = lib_.cuptiSubscribe_v2(&subscriber_, &Cupti::called_back, nullptr, &params);
  if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED)
    problem_ = "another tool uses CUPTI: '" + std::string(holder.data()) + "'. Try: end it, or run without it.";
  else if (result != CUPTI_SUCCESS)
    problem_ = "cuptiSubscribe_v2: " + lib_.text(result);
  if (!problem_.empty()) return;
  for (const auto id : {CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED})
    check(lib_.cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_RESOURCE, id), "callbacks of graph nodes");
  for (const auto id : {CUPTI_CBID_STATE_FATAL_ERROR, CUPTI_CBID_STATE_ERROR, CUPTI_CBID_STATE_WARNING})
    check(lib_.cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_STATE, id), "callbacks of errors");
}

void Cupti::add_error(std::string text) {
  std::lock_guard lock(mutex_);
  if (errors_.size() < 100) errors_.push_back(std::move(text));
}

void Cupti::check(CUptiResult result, const char* what) {
  if (result != CUPTI_SUCCESS) add_error(std::string(what) + ": " + lib_.text(result));
}

void CUPTIAPI Cupti::requested(uint8_t** buffer, size_t* bytes, size_t* records) {
  BufferPool* pool = get().pool_.load(std::memory_order_acquire);
  *buffer = pool ? pool->take() : nullptr;
  *bytes = *buffer ? BufferPool::kBufferBytes : 0;
  *records = 0;  // as many as fit
}

void CUPTIAPI Cupti::completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  if (BufferPool* pool = get().pool_.load(std::memory_order_acquire)) pool->complete(buffer, valid);
}

void CUPTIAPI Cupti::called_back(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  if (data == nullptr) return;
  try {
    if (domain == CUPTI_CB_DOMAIN_STATE) {
      const auto& note = static_cast<const CUpti_StateData*>(data)->notification;
      get().add_error("CUPTI says: " + std::string(note.message ? note.message : "?") + " " + get().lib_.text(note.result));
    } else if (domain == CUPTI_CB_DOMAIN_RESOURCE) {
      const auto& resource = *static_cast<const CUpti_ResourceData*>(data);
      if (resource.resourceDescriptor != nullptr) get().graph_node(id, *static_cast<const CUpti_GraphData*>(resource.resourceDescriptor));
    } else if (domain == CUPTI_CB_DOMAIN_DRIVER_API) {
      const auto& call = *static_cast<const CUpti_CallbackData*>(data);
      if (call.callbackSite == CUPTI_API_ENTER) get().launched(call.symbolName);
    }
  } catch (...) {  // no memory for a note
  }
}

void Cupti::graph_node(CUpti_CallbackId id, const CUpti_GraphData& graph) {
  GraphNode node{0, 0, thread_id(), now_ns()};
  if (lib_.cuptiGetGraphNodeId(graph.node, &node.id) != CUPTI_SUCCESS) return;
  const bool cloned = id == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED;
  if (cloned && lib_.cuptiGetGraphNodeId(graph.originalNode, &node.origin) != CUPTI_SUCCESS) return;
  std::lock_guard lock(mutex_);
  nodes_.push_back(node);
}

void Cupti::launched(const char* kernel) {
  std::lock_guard lock(mutex_);
  launches_.emplace_back(kernel ? kernel : "");
}

void Cupti::log_launches(bool on) {
  if (!problem_.empty()) return;
  for (const auto id : kLaunches) check(lib_.cuptiEnableCallback(on, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id), "callbacks of launches");
  std::lock_guard lock(mutex_);
  if (on) launches_.clear();
}

std::vector<std::string> Cupti::logged_launches() {
  std::vector<std::string> names;
  {
    std::lock_guard lock(mutex_);
    names = std::exchange(launches_, {});
  }
  for (std::string& name : names)
    if (!name.empty()) name = demangle(name.c_str());
  return names;
}

void Cupti::synchronize() {
  CUcontext context = nullptr;
  if (lib_.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr) return;  // this thread has no work on a device
  if (const CUresult result = lib_.cuCtxSynchronize(); result != CUDA_SUCCESS)
    add_error("cuCtxSynchronize failed with error " + std::to_string(static_cast<int>(result)));
}

/// Host and device records are on one clock only if CUPTI's is the wall clock.
void Cupti::check_clock() {
  uint64_t cupti = 0;
  const int64_t before = now_ns();
  check(lib_.cuptiGetTimestamp(&cupti), "cuptiGetTimestamp");
  const int64_t after = now_ns();
  constexpr int64_t kSlack = 20'000;
  const auto at = static_cast<int64_t>(cupti);
  if (at < before - kSlack || at > after + kSlack)
    add_error("CUPTI's clock is not the wall clock (another tool set it?): it is off by " + std::to_string(at - before) + " ns");
}

/// Everything that CUPTI holds goes to the decoder, or away.
void Cupti::drain(Decoder* decoder) {
  check(lib_.cuptiActivityFlushAll(0), "cuptiActivityFlushAll");
  BufferPool& pool = *pool_.load();
  for (const auto& full : pool.completed()) {
    if (decoder) decoder->decode(full.data, full.valid);
    pool.release(full.data);
  }
}

// The kind first, then all but a few calls off: single calls switched on without the kind gave no record of cuBLASLt's or NCCL's
// launches (CUPTI 13.0, driver 580). An identifier that the driver does not know is refused, and has no calls.
void Cupti::leave_out_driver_calls() {
  for (int id = CUPTI_DRIVER_TRACE_CBID_INVALID + 1; id < CUPTI_DRIVER_TRACE_CBID_SIZE; ++id) {
    const bool wanted = std::find(kDriverCalls.begin(), kDriverCalls.end(), id) != kDriverCalls.end();
    if (!wanted) (void)lib_.cuptiActivityEnableDriverApi(static_cast<CUpti_CallbackId>(id), 0);
  }
}

void Cupti::begin(int64_t buffer_bytes) {
  synchronize();
  if (pool_.load() == nullptr) pool_ = new BufferPool(std::max<int64_t>(buffer_bytes, kReadyBuffers * int64_t{BufferPool::kBufferBytes}));
  pool_.load()->prepare(kReadyBuffers);
  check(lib_.cuptiActivityEnableAndDump(CUPTI_ACTIVITY_KIND_DEVICE), "records of devices");
  for (const CUpti_ActivityKind kind : kKinds) check(lib_.cuptiActivityEnable(kind), "cuptiActivityEnable");
  check(lib_.cuptiActivityEnableAllSyncRecords(0), "cuptiActivityEnableAllSyncRecords");
  leave_out_driver_calls();
  for (const auto id : kQuietCalls) check(lib_.cuptiActivityEnableRuntimeApi(id, 0), "cuptiActivityEnableRuntimeApi");
  check_clock();
}

DeviceRecords Cupti::end() {
  synchronize();
  DeviceRecords out;
  Decoder decoder({lib_.cuptiActivityGetNextRecord, [this](auto domain, auto id) { return lib_.call_name(domain, id); }}, out);
  drain(&decoder);
  size_t dropped = 0;
  check(lib_.cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped), "cuptiActivityGetNumDroppedRecords");
  for (const CUpti_ActivityKind kind : kKinds) check(lib_.cuptiActivityDisable(kind), "cuptiActivityDisable");
  check(lib_.cuptiActivityDisable(CUPTI_ACTIVITY_KIND_DEVICE), "cuptiActivityDisable");
  drain(&decoder);
  decoder.finish();
  check_clock();
  out.available = true;
  out.dropped_records = static_cast<int64_t>(dropped);
  out.refused_buffers = pool_.load()->refused();
  uint32_t version = 0;
  if (lib_.cuptiGetVersion(&version) == CUPTI_SUCCESS) out.cupti_version = static_cast<int>(version);
  lib_.cuDriverGetVersion(&out.driver_version);
  out.runtime_version = CUDA_VERSION;
  std::lock_guard lock(mutex_);
  out.errors = std::exchange(errors_, {});
  out.graph_nodes = nodes_;  // kept: a graph outlives the window of its capture
  return out;
}

class CuptiSource : public DeviceSource {
 public:
  explicit CuptiSource(int64_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}
  void begin() override { Cupti::get().begin(buffer_bytes_); }
  void synchronize() override { Cupti::get().synchronize(); }
  DeviceRecords end() override { return Cupti::get().end(); }
  [[nodiscard]] std::string problem() const override { return Cupti::get().problem(); }

 private:
  int64_t buffer_bytes_;
};

}  // namespace

std::unique_ptr<DeviceSource> make_device_source(int64_t buffer_bytes) {
  const std::string& problem = Cupti::get().problem();
  if (!problem.empty()) return make_no_device_source(problem);
  return std::make_unique<CuptiSource>(buffer_bytes);
}

void log_launches(bool on) { Cupti::get().log_launches(on); }
std::vector<std::string> logged_launches() { return Cupti::get().logged_launches(); }

}  // namespace fsdpp::profiler

#include "profiler/decoder.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>

namespace fsdpp::profiler {

std::string demangle(const char* name) {
  if (name == nullptr) return "(kernel without a name)";
  int status = -1;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 && text ? text.get() : name;
}

namespace {

bool launches_one_kernel(const std::string& name) {
  for (const char* start : {"cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel"})
    if (name.starts_with(start)) return !name.ends_with("MultiDevice");
  return false;
}

/// "cudaLaunchKernel_v7000" → "cudaLaunchKernel"
std::string without_version(std::string name) {
  const size_t at = name.rfind("_v");
  if (at != name.npos && at + 2 < name.size() && name.find_first_not_of("0123456789", at + 2) == name.npos) name.resize(at);
  return name;
}

Copy::Kind copy_kind(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOA: return Copy::Kind::HostToDevice;
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
    case CUPTI_ACTIVITY_MEMCPY_KIND_ATOH: return Copy::Kind::DeviceToHost;
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
    case CUPTI_ACTIVITY_MEMCPY_KIND_ATOA:
    case CUPTI_ACTIVITY_MEMCPY_KIND_ATOD:
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOA: return Copy::Kind::DeviceToDevice;
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return Copy::Kind::PeerToPeer;
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOH: return Copy::Kind::HostToHost;
    default: return Copy::Kind::Other;
  }
}

Sync::Kind sync_kind(CUpti_ActivitySynchronizationType type) {
  switch (type) {
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE: return Sync::Kind::Event;
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT: return Sync::Kind::StreamWaitEvent;
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE: return Sync::Kind::Stream;
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE: return Sync::Kind::Context;
    default: return Sync::Kind::Other;
  }
}

std::string overhead_name(CUpti_ActivityOverheadKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_OVERHEAD_DRIVER_COMPILER: return "DRIVER_COMPILER";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_BUFFER_FLUSH: return "CUPTI_BUFFER_FLUSH";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_INSTRUMENTATION: return "CUPTI_INSTRUMENTATION";
    case CUPTI_ACTIVITY_OVERHEAD_CUPTI_RESOURCE: return "CUPTI_RESOURCE";
    case CUPTI_ACTIVITY_OVERHEAD_RUNTIME_TRIGGERED_MODULE_LOADING: return "RUNTIME_TRIGGERED_MODULE_LOADING";
    case CUPTI_ACTIVITY_OVERHEAD_LAZY_FUNCTION_LOADING: return "LAZY_FUNCTION_LOADING";
    case CUPTI_ACTIVITY_OVERHEAD_COMMAND_BUFFER_FULL: return "COMMAND_BUFFER_FULL";
    case CUPTI_ACTIVITY_OVERHEAD_ACTIVITY_BUFFER_REQUEST: return "ACTIVITY_BUFFER_REQUEST";
    case CUPTI_ACTIVITY_OVERHEAD_UVM_ACTIVITY_INIT: return "UVM_ACTIVITY_INIT";
    default: return "OVERHEAD_" + std::to_string(static_cast<int>(kind));
  }
}

/// What all records of device work share.
template <class Out, class Record>
Out on_stream(const Record& r) {
  Out out;
  out.start_ns = static_cast<int64_t>(r.start);
  out.end_ns = static_cast<int64_t>(r.end);
  out.device = static_cast<int>(r.deviceId);
  out.context = static_cast<int>(r.contextId);
  out.stream = static_cast<int>(r.streamId);
  out.correlation = r.correlationId;
  out.graph_node_id = static_cast<int64_t>(r.graphNodeId);
  return out;
}

template <class Record>
const Record& as(const CUpti_Activity& record) {
  return reinterpret_cast<const Record&>(record);
}

}  // namespace

size_t record_bytes(CUpti_ActivityKind kind) noexcept {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(CUpti_ActivityKernel10);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMCPY2: return sizeof(CUpti_ActivityMemcpyPtoP4);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER: return sizeof(CUpti_ActivityAPI);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return sizeof(CUpti_ActivitySynchronization2);
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT: return sizeof(CUpti_ActivityCudaEvent2);
    case CUPTI_ACTIVITY_KIND_OVERHEAD: return sizeof(CUpti_ActivityOverhead3);
    case CUPTI_ACTIVITY_KIND_DEVICE: return sizeof(CUpti_ActivityDevice5);
    default: return 0;
  }
}

void Decoder::decode(uint8_t* buffer, size_t valid) {
  if (valid == 0) return;
  CUpti_Activity* current = nullptr;
  const uint8_t* const end = buffer + valid;
  const uint8_t* done = buffer;
  bool sized = true;  // the size of the last record is known
  CUptiResult status = CUPTI_SUCCESS;
  while ((status = calls_.next(buffer, valid, &current)) == CUPTI_SUCCESS && current != nullptr) {
    const auto* at = reinterpret_cast<const uint8_t*>(current);
    if (at + sizeof(CUpti_Activity) > end || at + record_bytes(current->kind) > end) break;
    sized = record_bytes(current->kind) != 0;
    done = at + record_bytes(current->kind);
    if (sized)
      record(*current);
    else
      ++out_.unknown_kinds[static_cast<int>(current->kind)];
  }
  if (status == CUPTI_ERROR_MAX_LIMIT_REACHED && (!sized || done == end)) return;
  if (sized && done + sizeof(CUpti_Activity) <= end) note_unreadable(*reinterpret_cast<const CUpti_Activity*>(done));
  ++out_.truncated_buffers;
}

void Decoder::note_unreadable(const CUpti_Activity& r) {
  if (r.kind != CUPTI_ACTIVITY_KIND_INVALID && record_bytes(r.kind) == 0) ++out_.unknown_kinds[static_cast<int>(r.kind)];
}

void Decoder::finish() {
  for (Sync& sync : out_.syncs) {
    const auto found = event_correlation_.find(static_cast<uint64_t>(sync.event_correlation));
    sync.event_correlation = found == event_correlation_.end() ? 0 : found->second;
  }
}

void Decoder::record(const CUpti_Activity& r) {
  switch (r.kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return kernel(as<CUpti_ActivityKernel10>(r));
    case CUPTI_ACTIVITY_KIND_MEMCPY: return memcpy_(as<CUpti_ActivityMemcpy6>(r));
    case CUPTI_ACTIVITY_KIND_MEMCPY2: return peer_copy(as<CUpti_ActivityMemcpyPtoP4>(r));
    case CUPTI_ACTIVITY_KIND_MEMSET: return memset_(as<CUpti_ActivityMemset4>(r));
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER: return call(as<CUpti_ActivityAPI>(r));
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: return sync(as<CUpti_ActivitySynchronization2>(r));
    case CUPTI_ACTIVITY_KIND_CUDA_EVENT: return event(as<CUpti_ActivityCudaEvent2>(r));
    case CUPTI_ACTIVITY_KIND_OVERHEAD: return overhead(as<CUpti_ActivityOverhead3>(r));
    case CUPTI_ACTIVITY_KIND_DEVICE: return device(as<CUpti_ActivityDevice5>(r));
    default: return;
  }
}

void Decoder::kernel(const CUpti_ActivityKernel10& r) {
  Kernel k = on_stream<Kernel>(r);
  const char* name = r.name;
  auto& text = demangled_[name ? name : ""];
  if (text.empty()) text = demangle(name);
  k.name = text;
  k.grid[0] = r.gridX, k.grid[1] = r.gridY, k.grid[2] = r.gridZ;
  k.block[0] = r.blockX, k.block[1] = r.blockY, k.block[2] = r.blockZ;
  k.registers = r.registersPerThread;
  k.shared_memory = int64_t{r.staticSharedMemory} + r.dynamicSharedMemory;
  k.graph_id = static_cast<int>(r.graphId);
  k.queued_ns = static_cast<int64_t>(r.queued);
  out_.kernels.push_back(std::move(k));
}

void Decoder::memcpy_(const CUpti_ActivityMemcpy6& r) {
  Copy c = on_stream<Copy>(r);
  c.kind = copy_kind(r.copyKind);
  c.bytes = static_cast<int64_t>(r.bytes);
  c.pinned = r.srcKind != CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE && r.dstKind != CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  out_.copies.push_back(c);
}

void Decoder::peer_copy(const CUpti_ActivityMemcpyPtoP4& r) {
  Copy c = on_stream<Copy>(r);
  c.kind = Copy::Kind::PeerToPeer;
  c.bytes = static_cast<int64_t>(r.bytes);
  out_.copies.push_back(c);
}

void Decoder::memset_(const CUpti_ActivityMemset4& r) {
  Copy c = on_stream<Copy>(r);
  c.kind = Copy::Kind::Memset;
  c.bytes = static_cast<int64_t>(r.bytes);
  out_.copies.push_back(c);
}

void Decoder::call(const CUpti_ActivityAPI& r) {
  Runtime call;
  call.driver = r.kind == CUPTI_ACTIVITY_KIND_DRIVER;
  call.name = name_of_call(call.driver ? CUPTI_CB_DOMAIN_DRIVER_API : CUPTI_CB_DOMAIN_RUNTIME_API, r.cbid);
  call.start_ns = static_cast<int64_t>(r.start);
  call.end_ns = static_cast<int64_t>(r.end);
  call.thread = r.threadId;
  call.correlation = r.correlationId;
  call.launch = r.returnValue == 0 && launches_one_kernel(call.name);
  out_.runtime.push_back(std::move(call));
}

void Decoder::sync(const CUpti_ActivitySynchronization2& r) {
  Sync s;
  s.kind = sync_kind(r.type);
  s.start_ns = static_cast<int64_t>(r.start);
  s.end_ns = static_cast<int64_t>(r.end);
  s.context = static_cast<int>(r.contextId);
  s.stream = r.streamId == static_cast<uint32_t>(CUPTI_SYNCHRONIZATION_INVALID_VALUE) ? -1 : static_cast<int>(r.streamId);
  s.event = static_cast<int64_t>(r.cudaEventId);
  s.correlation = r.correlationId;
  s.event_correlation = static_cast<int64_t>(r.cudaEventSyncId);  // replaced by its record's correlation when all are read
  out_.syncs.push_back(s);
}

void Decoder::event(const CUpti_ActivityCudaEvent2& r) {
  EventRecord e;
  e.event = r.eventId;
  e.correlation = r.correlationId;
  e.device = static_cast<int>(r.deviceId);
  e.context = static_cast<int>(r.contextId);
  e.stream = static_cast<int>(r.streamId);
  out_.events.push_back(e);
  event_correlation_[r.cudaEventSyncId] = e.correlation;
}

void Decoder::overhead(const CUpti_ActivityOverhead3& r) {
  Overhead o;
  o.kind = overhead_name(r.overheadKind);
  o.start_ns = static_cast<int64_t>(r.start);
  o.end_ns = static_cast<int64_t>(r.end);
  if (r.objectKind == CUPTI_ACTIVITY_OBJECT_THREAD) o.thread = r.objectId.pt.threadId;
  out_.overheads.push_back(std::move(o));
  std::free(r.overheadData);  // ours by CUPTI's contract
}

void Decoder::device(const CUpti_ActivityDevice5& r) {
  for (const Device& known : out_.devices)
    if (known.id == static_cast<int>(r.id)) return;
  Device d;
  d.id = static_cast<int>(r.id);
  d.name = r.name ? r.name : "";
  d.memory_bytes = static_cast<int64_t>(r.globalMemorySize);
  d.major = static_cast<int>(r.computeCapabilityMajor);
  d.minor = static_cast<int>(r.computeCapabilityMinor);
  d.sm_count = static_cast<int>(r.numMultiprocessors);
  d.warp_size = static_cast<int>(r.numThreadsPerWarp);
  d.max_threads_per_block = static_cast<int>(r.maxThreadsPerBlock);
  d.max_threads_per_sm = static_cast<int>(r.maxWarpsPerMultiprocessor * r.numThreadsPerWarp);
  d.registers_per_block = static_cast<int>(r.maxRegistersPerBlock);
  d.registers_per_sm = static_cast<int>(r.maxRegistersPerMultiprocessor);
  d.shared_per_block = r.maxSharedMemoryPerBlock;
  d.shared_per_sm = r.maxSharedMemoryPerMultiprocessor;
  out_.devices.push_back(std::move(d));
}

const std::string& Decoder::name_of_call(CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  std::string& name = names_[{static_cast<int>(domain), id}];
  if (name.empty()) name = without_version(calls_.call_name(domain, id));
  return name;
}

}  // namespace fsdpp::profiler

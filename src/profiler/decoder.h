#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "profiler/cupti_headers.h"
#include "profiler/device_records.h"

namespace fsdpp::profiler {

/// What the decoder needs of CUPTI: the step to the next record, and the name of a call.
struct DecoderCalls {
  std::function<CUptiResult(uint8_t* buffer, size_t bytes, CUpti_Activity** record)> next;
  std::function<std::string(CUpti_CallbackDomain, CUpti_CallbackId)> call_name;
};

/// Turns buffers of activity records into `out`. Records come in any order, within a buffer and between them.
class Decoder {
 public:
  Decoder(DecoderCalls calls, DeviceRecords& out) : calls_(std::move(calls)), out_(out) {}

  /// The first `valid` bytes of a buffer.
  void decode(uint8_t* buffer, size_t valid);
  /// After the last buffer: joins waits with the events that they wait for.
  void finish();

 private:
  void note_unreadable(const CUpti_Activity& record);
  void record(const CUpti_Activity& record);
  void kernel(const CUpti_ActivityKernel10& r);
  void memcpy_(const CUpti_ActivityMemcpy6& r);
  void peer_copy(const CUpti_ActivityMemcpyPtoP4& r);
  void memset_(const CUpti_ActivityMemset4& r);
  void call(const CUpti_ActivityAPI& r);
  void sync(const CUpti_ActivitySynchronization2& r);
  void event(const CUpti_ActivityCudaEvent2& r);
  void overhead(const CUpti_ActivityOverhead3& r);
  void device(const CUpti_ActivityDevice5& r);
  const std::string& name_of_call(CUpti_CallbackDomain domain, CUpti_CallbackId id);

  DecoderCalls calls_;
  DeviceRecords& out_;
  std::map<std::pair<int, uint32_t>, std::string> names_;
  std::map<std::string, std::string> demangled_;
  std::map<uint64_t, int64_t> event_correlation_;  // number of a cudaEventRecord, its correlation
};

/// A kernel's name as traces show it.
[[nodiscard]] std::string demangle(const char* name);

/// Bytes of the record of `kind` as this version of CUPTI writes it; 0: unknown to the decoder.
[[nodiscard]] size_t record_bytes(CUpti_ActivityKind kind) noexcept;

}  // namespace fsdpp::profiler

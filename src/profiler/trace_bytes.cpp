#include <cstring>
#include <type_traits>

#include "base/enforce.h"
#include "fsdpp/profiler/chrome_trace.h"

/// A trace as bytes: fields in the order of records.h, whole numbers and doubles as they lie in memory (little-endian),
/// strings and lists after their length. The version changes with the fields.
namespace fsdpp::profiler {
namespace {

constexpr std::string_view kMagic = "fsdpp-trace-2\n";

template <class A> void fields(A& a, CpuOp& r) {
  a(r.name, r.start_ns, r.end_ns, r.thread, r.id, r.parent, r.scope, r.shapes, r.dtypes, r.bytes, r.device_bytes, r.flops, r.sequence,
    r.forward_thread, r.category);
}
template <class A> void fields(A& a, Kernel& r) {
  a(r.name, r.start_ns, r.end_ns, r.device, r.context, r.stream, r.correlation, r.grid, r.block, r.registers, r.shared_memory,
    r.graph_node_id, r.graph_id, r.queued_ns, r.op, r.scope);
}
template <class A> void fields(A& a, Copy& r) {
  a(r.kind, r.start_ns, r.end_ns, r.bytes, r.device, r.context, r.stream, r.correlation, r.graph_node_id, r.pinned, r.op, r.scope);
}
template <class A> void fields(A& a, Runtime& r) {
  a(r.name, r.start_ns, r.end_ns, r.thread, r.correlation, r.launch, r.driver, r.op, r.scope);
}
template <class A> void fields(A& a, Scope& r) { a(r.kind, r.name, r.start_ns, r.end_ns, r.thread, r.bytes, r.parent); }
template <class A> void fields(A& a, Sync& r) {
  a(r.kind, r.start_ns, r.end_ns, r.device, r.context, r.stream, r.event, r.correlation, r.event_correlation, r.thread);
}
template <class A> void fields(A& a, EventRecord& r) { a(r.event, r.correlation, r.device, r.context, r.stream); }
template <class A> void fields(A& a, Overhead& r) { a(r.kind, r.start_ns, r.end_ns, r.thread); }
template <class A> void fields(A& a, MemoryEvent& r) {
  a(r.time_ns, r.bytes, r.total_bytes, r.reserved_bytes, r.address, r.device, r.thread, r.category, r.op, r.scope, r.before);
}
template <class A> void fields(A& a, Collective& r) {
  a(r.comm, r.op, r.label, r.sequence, r.bytes, r.start_ns, r.end_ns, r.issued_ns, r.device, r.stream, r.on_device, r.kernel, r.scope, r.thread);
}
template <class A> void fields(A& a, StepMark& r) { a(r.step, r.start_ns, r.end_ns, r.thread); }
template <class A> void fields(A& a, Device& r) {
  a(r.id, r.name, r.memory_bytes, r.major, r.minor, r.sm_count, r.warp_size, r.max_threads_per_block, r.max_threads_per_sm,
    r.registers_per_block, r.registers_per_sm, r.shared_per_block, r.shared_per_sm);
}
template <class A> void fields(A& a, Audit& r) {
  a(r.launches, r.graph_launches, r.kernels, r.graph_kernels, r.launches_without_kernel, r.kernels_without_launch, r.dropped_records,
    r.unknown_records, r.truncated_buffers, r.refused_buffers, r.zero_stamps, r.reversed_stamps, r.out_of_order, r.outside_window,
    r.cut_by_window, r.api_without_op, r.clock_shift_ns, r.cupti_errors, r.overhead_ns, r.errors, r.notes);
}
template <class A> void fields(A& a, Trace& r) {
  a(r.rank, r.world_size, r.host, r.process, r.start_ns, r.end_ns, r.clock_offset_ns, r.has_cuda, r.record_shapes, r.profile_memory,
    r.with_flops, r.cupti_version, r.cuda_runtime_version, r.cuda_driver_version, r.metadata, r.devices, r.cpu_ops, r.kernels, r.copies,
    r.runtime, r.scopes, r.syncs, r.events, r.overheads, r.memory, r.collectives, r.steps, r.audit);
}

template <class T>
concept Plain = std::is_arithmetic_v<T> || std::is_enum_v<T>;

struct Writer {
  std::string out;

  template <class... Fields> void operator()(Fields&... f) { (one(f), ...); }

  void raw(const void* data, size_t bytes) { out.append(static_cast<const char*>(data), bytes); }
  void size(size_t n) {
    const auto wide = static_cast<uint64_t>(n);
    raw(&wide, sizeof(wide));
  }
  template <Plain T> void one(T& value) { raw(&value, sizeof(value)); }
  template <Plain T, size_t N> void one(T (&values)[N]) { raw(values, sizeof(values)); }
  void one(std::string& text) {
    size(text.size());
    raw(text.data(), text.size());
  }
  void one(MetadataValue& value) {
    size(value.index());
    std::visit([this](auto& v) { one(v); }, value);
  }
  template <class T> void one(std::vector<T>& items) {
    size(items.size());
    for (T& item : items) one(item);
  }
  template <class T> void one(std::map<std::string, T>& items) {
    size(items.size());
    for (auto& [key, value] : items) {
      std::string name = key;
      one(name);
      one(value);
    }
  }
  template <class T> void one(T& record) { fields(*this, record); }
};

struct ByteReader {
  std::string_view in;

  template <class... Fields> void operator()(Fields&... f) { (one(f), ...); }

  void raw(void* data, size_t bytes) {
    FSDPP_ENFORCE(bytes <= in.size(), Error, "profiler: the bytes of a trace end too early: expected {} more, got {}", bytes, in.size());
    if (bytes > 0) std::memcpy(data, in.data(), bytes);
    in.remove_prefix(bytes);
  }
  size_t size() {
    uint64_t n = 0;
    raw(&n, sizeof(n));
    FSDPP_ENFORCE(n <= in.size(), Error, "profiler: the bytes of a trace are damaged: a list of {} items in {} bytes", n, in.size());
    return static_cast<size_t>(n);
  }
  void one(bool& value) {
    unsigned char byte = 0;
    raw(&byte, 1);
    value = byte != 0;
  }
  template <Plain T> void one(T& value) { raw(&value, sizeof(value)); }
  template <Plain T, size_t N> void one(T (&values)[N]) { raw(values, sizeof(values)); }
  void one(std::string& text) {
    text.resize(size());
    raw(text.data(), text.size());
  }
  void one(MetadataValue& value) {
    switch (size()) {
      case 0: one(value.emplace<std::string>()); return;
      case 1: one(value.emplace<int64_t>()); return;
      case 2: one(value.emplace<double>()); return;
      default: fail<Error>("profiler: the bytes of a trace are damaged: metadata of an unknown type");
    }
  }
  template <class T> void one(std::vector<T>& items) {
    const size_t n = size();
    items.clear();
    for (size_t i = 0; i < n; ++i) one(items.emplace_back());
  }
  template <class T> void one(std::map<std::string, T>& items) {
    for (size_t n = size(); n > 0; --n) {
      std::string key;
      one(key);
      one(items[key]);
    }
  }
  template <class T> void one(T& record) { fields(*this, record); }
};

}  // namespace

std::string to_bytes(const Trace& trace) {
  Writer writer{std::string(kMagic)};
  writer(const_cast<Trace&>(trace));  // fields() serves reading too; nothing is changed
  return std::move(writer.out);
}

Trace from_bytes(std::string_view bytes) {
  FSDPP_ENFORCE(bytes.starts_with(kMagic), Error, "profiler: expected the bytes of a trace of this version, got {} other bytes", bytes.size());
  ByteReader reader{bytes.substr(kMagic.size())};
  Trace trace;
  reader(trace);
  FSDPP_ENFORCE(reader.in.empty(), Error, "profiler: expected the end of a trace, got {} more bytes", reader.in.size());
  return trace;
}

}  // namespace fsdpp::profiler

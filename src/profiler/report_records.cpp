#include "profiler/report_records.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>

#include "base/enforce.h"
#include "profiler/intervals.h"

namespace fsdpp::profiler {
namespace {

using nlohmann::json;

const json& member(const json& object, const char* key) {
  static const json none;
  const auto it = object.find(key);
  return it == object.end() ? none : *it;
}
int64_t whole(const json& value, int64_t fallback = 0) {
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return std::llround(value.get<double>());
  if (value.is_string()) return std::strtoll(value.get_ref<const std::string&>().c_str(), nullptr, 10);
  return fallback;
}
std::string text(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.is_null() ? "" : value.dump();
}

/// A list as records.h writes it: "[[2, 3], []]" or "['float', '']".
std::string list_text(const json& list) {
  if (list.is_string()) return list.get<std::string>();
  if (!list.is_array()) return {};
  std::string out = "[";
  for (const json& item : list) {
    if (out.size() > 1) out += ", ";
    if (item.is_string()) {
      out.append("'").append(item.get_ref<const std::string&>()).append("'");
    } else {
      out += item.is_array() ? list_text(item) : item.dump();
    }
  }
  return out + "]";
}

trace::Kind kind_of(const std::string& name) {
  for (const auto kind : {trace::Kind::Unshard, trace::Kind::Reshard, trace::Kind::Reduce, trace::Kind::PreForward,
                          trace::Kind::PostForward, trace::Kind::PreBackward, trace::Kind::PostBackward,
                          trace::Kind::Optimizer, trace::Kind::Loader}) {
    if (name == trace::name_of(kind)) return kind;
  }
  return trace::Kind::User;
}

/// Collects the events of one rank.
class Builder {
 public:
  explicit Builder(int64_t base) : base_(base) {}
  Trace trace;
  int64_t cpu_process = -1;

  void add(const json& e) {
    const std::string category = text(member(e, "cat"));
    const json& args = member(e, "args");
    name_ = text(member(e, "name"));
    start_ = base_ + std::llround(member(e, "ts").is_number() ? member(e, "ts").get<double>() * 1000 : 0);
    end_ = start_ + std::llround(member(e, "dur").is_number() ? member(e, "dur").get<double>() * 1000 : 0);
    thread_ = whole(member(e, "tid"));
    if (category == "cpu_op") {
      cpu_op(args);
    } else if (category == "user_annotation") {
      annotation(args);
    } else if (category == "cuda_runtime" || category == "cuda_driver") {
      runtime(args, category == "cuda_driver");
    } else if (category == "kernel") {
      kernel(args);
    } else if (category == "gpu_memcpy" || category == "gpu_memset") {
      copy(args, category == "gpu_memset");
    } else if (category == "cuda_sync") {
      sync(args);
    } else if (category == "overhead") {
      trace.overheads.push_back({name_, start_, end_, thread_});
    } else if (category == "collective") {
      collective(args, whole(member(e, "pid")));
    } else if (name_ == "[memory]") {
      memory(args);
      return;
    } else {
      return;
    }
    trace.start_ns = trace.start_ns == 0 ? start_ : std::min(trace.start_ns, start_);
    trace.end_ns = std::max(trace.end_ns, end_);
  }

  Trace take() {
    link();
    if (trace.audit.launches == 0 && trace.audit.kernels == 0) count();
    trace.has_cuda = !trace.kernels.empty();
    return std::move(trace);
  }

 private:
  static constexpr int64_t kUnitRow = 100'000'000;  // rows of units lie beside their thread and repeat its scopes

  template <class Record>
  Record timed() const {
    Record r;
    r.start_ns = start_;
    r.end_ns = end_;
    return r;
  }
  void cpu_op(const json& args) {
    if (name_.starts_with("enumerate(DataLoader)")) return scope(trace::Kind::Loader, name_, 0);
    auto op = timed<CpuOp>();
    op.name = name_;
    op.thread = thread_;
    op.id = static_cast<uint64_t>(whole(member(args, "External id")));
    op.shapes = list_text(member(args, "Input Dims"));
    op.dtypes = list_text(member(args, "Input type"));
    const json& flops = member(args, "Flops");
    op.flops = flops.is_number() ? flops.get<double>() : 0;
    op.sequence = whole(member(args, "Sequence number"), -1);
    trace.cpu_ops.push_back(std::move(op));
  }
  void annotation(const json& args) {
    if (name_.starts_with("ProfilerStep#")) {
      trace.steps.push_back({std::strtoll(name_.c_str() + 13, nullptr, 10), start_, end_, thread_});
    } else if (args.contains("Kind")) {
      const std::string kind = text(args["Kind"]);
      const bool prefixed = name_.starts_with(kind + " ");
      scope(kind_of(kind), prefixed ? name_.substr(kind.size() + 1) : name_, whole(member(args, "Bytes")));
    } else if (name_.starts_with("enumerate(DataLoader)")) {
      scope(trace::Kind::Loader, name_, 0);
    } else if (thread_ < kUnitRow) {
      scope(name_.starts_with("Optimizer.") ? trace::Kind::Optimizer : trace::Kind::User, name_, 0);
    }
  }
  void scope(trace::Kind kind, std::string name, int64_t bytes) {
    auto s = timed<Scope>();
    s.kind = kind;
    s.name = std::move(name);
    s.thread = thread_;
    s.bytes = bytes;
    trace.scopes.push_back(std::move(s));
  }
  void runtime(const json& args, bool driver) {
    auto r = timed<Runtime>();
    r.name = name_;
    r.thread = thread_;
    r.correlation = whole(member(args, "correlation"));
    r.driver = driver;
    r.launch =
        name_.find("LaunchKernel") != std::string::npos || name_.find("LaunchCooperativeKernel") != std::string::npos;
    trace.runtime.push_back(std::move(r));
  }
  template <class Record>
  void place(Record& r, const json& args) {
    r.device = static_cast<int>(whole(member(args, "device")));
    r.context = static_cast<int>(whole(member(args, "context")));
    r.stream = static_cast<int>(whole(member(args, "stream")));
    r.correlation = whole(member(args, "correlation"));
  }
  void kernel(const json& args) {
    auto k = timed<Kernel>();
    k.name = name_;
    place(k, args);
    k.registers = static_cast<int>(whole(member(args, "registers per thread")));
    k.shared_memory = whole(member(args, "shared memory"));
    k.graph_node_id = whole(member(args, "graph node id"));
    for (int i = 0; i < 3; ++i) {
      if (member(args, "grid").size() == 3) k.grid[i] = static_cast<int>(whole(args["grid"][i]));
      if (member(args, "block").size() == 3) k.block[i] = static_cast<int>(whole(args["block"][i]));
    }
    kernel_ops_.push_back(static_cast<uint64_t>(whole(member(args, "External id"))));
    trace.kernels.push_back(std::move(k));
    if (args.contains("Collective name")) {
      Collective c = collective_from(args, text(member(args, "Process Group Description")));
      c.device = trace.kernels.back().device;
      c.stream = trace.kernels.back().stream;
      c.on_device = true;
      c.kernel = static_cast<int>(trace.kernels.size()) - 1;
      known_.insert({c.comm, c.sequence});
      trace.collectives.push_back(std::move(c));
    }
  }
  Collective collective_from(const json& args, std::string label) const {
    auto c = timed<Collective>();
    c.op = text(member(args, "Collective name"));
    c.comm = text(member(args, "Process Group Name"));
    c.label = std::move(label);
    c.sequence = whole(member(args, "Seq"));
    c.bytes = whole(member(args, "Bytes"));
    c.thread = thread_;
    return c;
  }
  void collective(const json& args, int64_t process) {
    Collective c = collective_from(args, text(member(args, "Label")));
    c.on_device = process != cpu_process;
    if (c.on_device) c.device = static_cast<int>(process % 1000);
    c.thread = c.on_device ? 0 : thread_ % 10'000'000;  // the row lies beside its thread
    rows_.push_back(std::move(c));
  }
  void copy(const json& args, bool memset) {
    auto c = timed<Copy>();
    place(c, args);
    c.bytes = whole(member(args, "bytes"));
    c.kind = memset ? Copy::Kind::Memset : Copy::Kind::Other;
    for (const auto& [part, kind] : {std::pair{"HtoD", Copy::Kind::HostToDevice},
                                     {"DtoH", Copy::Kind::DeviceToHost},
                                     {"DtoD", Copy::Kind::DeviceToDevice},
                                     {"PtoP", Copy::Kind::PeerToPeer}}) {
      if (name_.find(part) != std::string::npos) c.kind = kind;
    }
    trace.copies.push_back(c);
  }
  void sync(const json& args) {
    auto s = timed<Sync>();
    s.kind = Sync::Kind::Other;
    for (const auto& [part, kind] : {std::pair{"Stream Wait", Sync::Kind::StreamWaitEvent},
                                     {"Event Sync", Sync::Kind::Event},
                                     {"Stream Sync", Sync::Kind::Stream},
                                     {"Context Sync", Sync::Kind::Context}}) {
      if (name_.find(part) != std::string::npos) s.kind = kind;
    }
    s.correlation = whole(member(args, "correlation"));
    trace.syncs.push_back(s);
  }
  void memory(const json& args) {
    MemoryEvent m;
    m.time_ns = start_;
    m.thread = thread_;
    m.bytes = whole(member(args, "Bytes"));
    m.total_bytes = whole(member(args, "Total Allocated"));
    m.reserved_bytes = whole(member(args, "Total Reserved"));
    m.address = static_cast<uint64_t>(whole(member(args, "Addr")));
    m.device = whole(member(args, "Device Type")) == 1 ? static_cast<int>(whole(member(args, "Device Id"))) : -1;
    const std::string category = text(member(args, "Category"));
    const std::vector<const char*> names{"parameters", "gradients", "gathered", "activations", "optimizer", "other"};
    for (size_t i = 0; i < names.size(); ++i) {
      if (category == names[i]) m.category = static_cast<MemoryEvent::Category>(i);
    }
    trace.memory.push_back(m);
  }

  /// Indices between records.
  void link() {
    for (Collective& c : rows_) {
      if (!known_.contains({c.comm, c.sequence})) trace.collectives.push_back(std::move(c));
    }
    const IntervalIndex ops(trace.cpu_ops);
    const IntervalIndex scopes(trace.scopes);
    std::unordered_map<uint64_t, int> by_id;
    for (size_t i = 0; i < trace.cpu_ops.size(); ++i) {
      CpuOp& op = trace.cpu_ops[i];
      op.parent = ops.parents()[i];
      op.scope = scopes.innermost(op.thread, op.start_ns);
      by_id.emplace(op.id, static_cast<int>(i));
    }
    for (size_t i = 0; i < trace.scopes.size(); ++i) trace.scopes[i].parent = scopes.parents()[i];
    std::unordered_map<int64_t, const Runtime*> launches;
    for (Runtime& r : trace.runtime) {
      r.op = ops.innermost(r.thread, r.start_ns);
      r.scope = scopes.innermost(r.thread, r.start_ns);
      launches.emplace(r.correlation, &r);
    }
    for (size_t i = 0; i < trace.kernels.size(); ++i) {
      Kernel& k = trace.kernels[i];
      const auto launch = launches.find(k.correlation);
      if (launch != launches.end()) k.op = launch->second->op, k.scope = launch->second->scope;
      const auto op = kernel_ops_[i] != 0 ? by_id.find(kernel_ops_[i]) : by_id.end();
      if (op != by_id.end()) k.op = op->second;
    }
    for (MemoryEvent& m : trace.memory)
      m.op = ops.innermost(m.thread, m.time_ns), m.scope = scopes.innermost(m.thread, m.time_ns);
  }
  void count() {
    trace.audit.kernels = std::ssize(trace.kernels);
    for (const Runtime& r : trace.runtime) trace.audit.launches += r.launch ? 1 : 0;
    trace.audit.notes.emplace_back(
        "the trace has no audit of its own: launches and kernels were counted when it was read");
  }

  int64_t base_;
  std::string name_;
  int64_t start_ = 0, end_ = 0, thread_ = 0;
  std::vector<uint64_t> kernel_ops_;
  std::vector<Collective> rows_;
  std::set<std::pair<std::string, int64_t>> known_;
};

std::vector<Device> devices_of(const json& file) {
  std::vector<Device> out;
  for (const json& p : member(file, "deviceProperties").is_array() ? file["deviceProperties"] : json::array()) {
    Device d;
    const auto number = [&](const char* key) { return static_cast<int>(whole(member(p, key))); };
    d.id = number("id");
    d.name = text(member(p, "name"));
    d.memory_bytes = whole(member(p, "totalGlobalMem"));
    d.major = number("computeMajor");
    d.minor = number("computeMinor");
    d.sm_count = number("numSms");
    d.warp_size = std::max(number("warpSize"), 1);
    d.max_threads_per_block = number("maxThreadsPerBlock");
    d.max_threads_per_sm = number("maxThreadsPerMultiprocessor");
    d.registers_per_block = number("regsPerBlock");
    d.registers_per_sm = number("regsPerMultiprocessor");
    d.shared_per_block = whole(member(p, "sharedMemPerBlock"));
    d.shared_per_sm = whole(member(p, "sharedMemPerMultiprocessor"));
    out.push_back(std::move(d));
  }
  return out;
}

Audit audit_of(const json& a) {
  Audit out;
  const std::pair<const char*, int64_t Audit::*> fields[] = {
      {"launches", &Audit::launches},
      {"graph_launches", &Audit::graph_launches},
      {"kernels", &Audit::kernels},
      {"graph_kernels", &Audit::graph_kernels},
      {"launches_without_kernel", &Audit::launches_without_kernel},
      {"kernels_without_launch", &Audit::kernels_without_launch},
      {"dropped_records", &Audit::dropped_records},
      {"unknown_records", &Audit::unknown_records},
      {"truncated_buffers", &Audit::truncated_buffers},
      {"refused_buffers", &Audit::refused_buffers},
      {"zero_stamps", &Audit::zero_stamps},
      {"reversed_stamps", &Audit::reversed_stamps},
      {"out_of_order", &Audit::out_of_order},
      {"outside_window", &Audit::outside_window},
      {"cut_by_window", &Audit::cut_by_window},
      {"api_without_op", &Audit::api_without_op},
      {"clock_shift_ns", &Audit::clock_shift_ns},
      {"cupti_errors", &Audit::cupti_errors}};
  for (const auto& [key, field] : fields) out.*field = whole(member(a, key));
  for (const auto& [kind, ns] : member(a, "overhead_ns").items()) out.overhead_ns[kind] = whole(ns);
  for (const json& line : member(a, "errors")) out.errors.push_back(text(line));
  for (const json& line : member(a, "notes")) out.notes.push_back(text(line));
  return out;
}

void describe(Trace& t, const json& file) {
  t.devices = devices_of(file);
  t.world_size = static_cast<int>(std::max<int64_t>(whole(member(member(file, "distributedInfo"), "world_size")), 1));
  t.cupti_version = static_cast<int>(whole(member(file, "cupti_version")));
  for (const auto& [key, value] : file.items()) {
    if (!key.starts_with("meta.")) continue;
    if (value.is_number_integer())
      t.metadata[key.substr(5)] = value.get<int64_t>();
    else if (value.is_number())
      t.metadata[key.substr(5)] = value.get<double>();
    else
      t.metadata[key.substr(5)] = text(value);
  }
}

}  // namespace

std::vector<Trace> traces_from_chrome(const json& file) {
  const json& events = file.is_array() ? file : member(file, "traceEvents");
  FSDPP_ENFORCE(events.is_array(), Error, "expected Chrome's trace format with a list 'traceEvents'");
  const json& audits = file.is_object() ? member(file, "audit") : json();
  const bool merged = audits.size() > 1;
  const int64_t base = file.is_object() ? whole(member(file, "baseTimeNanoseconds")) : 0;
  const int only = file.is_object() ? static_cast<int>(whole(member(member(file, "distributedInfo"), "rank"))) : 0;
  const auto rank_of = [&](const json& e) { return merged ? static_cast<int>(whole(member(e, "pid")) / 1000) : only; };
  std::map<int, Builder> ranks;
  const auto builder = [&](int rank) -> Builder& { return ranks.try_emplace(rank, base).first->second; };
  for (const json& e : events) {  // who is the host, before anything depends on it
    if (text(member(e, "name")) == "process_labels" && text(member(member(e, "args"), "labels")) == "CPU") {
      builder(rank_of(e)).cpu_process = whole(member(e, "pid"));
    }
  }
  for (const json& e : events) {
    if (const std::string phase = text(member(e, "ph")); phase == "X" || phase == "i") builder(rank_of(e)).add(e);
  }
  for (const json& a : audits.is_array() ? audits : json::array()) {
    builder(merged ? static_cast<int>(whole(member(a, "rank"))) : only).trace.audit = audit_of(a);
  }
  std::vector<Trace> out;
  for (auto& [rank, b] : ranks) {
    b.trace.rank = rank;
    if (file.is_object()) describe(b.trace, file);
    out.push_back(b.take());
  }
  FSDPP_ENFORCE(!out.empty(), Error, "expected events, got none");
  return out;
}

}  // namespace fsdpp::profiler

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>

#include "fsdpp/profiler/speed_of_light.h"
#include "profiler/chrome_writer.h"

namespace fsdpp::profiler {
namespace {

constexpr int64_t kOverlapRow = 1'000'000;    // further rows of a stream
constexpr int64_t kUnitRow = 100'000'000;     // rows of units, beside their thread
constexpr int64_t kCollectiveRow = 10'000'000;
constexpr int64_t kSyncRow = 20'000'000;

/// Items by start, so that lanes fill from the left.
template <class Item>
std::vector<const Item*> by_start(const std::vector<Item>& items) {
  std::vector<const Item*> order;
  for (const Item& item : items) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](const Item* a, const Item* b) { return a->start_ns < b->start_ns; });
  return order;
}

std::string scope_name(const Scope& scope) {
  return scope.kind == trace::Kind::User ? scope.name : std::string(trace::name_of(scope.kind)) + " " + scope.name;
}

bool derived(const Scope& scope) { return scope.kind == trace::Kind::Forward || scope.kind == trace::Kind::Backward; }

const char* copy_text(Copy::Kind kind) {
  switch (kind) {
    case Copy::Kind::HostToDevice: return "Memcpy HtoD";
    case Copy::Kind::DeviceToHost: return "Memcpy DtoH";
    case Copy::Kind::DeviceToDevice: return "Memcpy DtoD";
    case Copy::Kind::PeerToPeer: return "Memcpy PtoP";
    case Copy::Kind::HostToHost: return "Memcpy HtoH";
    case Copy::Kind::Memset: return "Memset (Device)";
    case Copy::Kind::Other: break;
  }
  return "Memcpy";
}

const char* sync_text(Sync::Kind kind) {
  switch (kind) {
    case Sync::Kind::Event: return "Event Sync";
    case Sync::Kind::StreamWaitEvent: return "Stream Wait Event";
    case Sync::Kind::Stream: return "Stream Sync";
    case Sync::Kind::Context: return "Context Sync";
    case Sync::Kind::Other: break;
  }
  return "Sync";
}

/// As PyTorch's profiler estimates it: what fits at once, but no more than the grid's blocks give each multiprocessor.
int64_t achieved_occupancy(const Kernel& kernel, const Device& device, double blocks_per_sm) {
  const Occupancy fit = occupancy(kernel, device);
  if (fit.blocks <= 0) return 0;
  return std::llround(fit.percent * std::min(1.0, blocks_per_sm / fit.blocks));
}

void append_triple(std::string& out, const int (&v)[3]) {
  out += "[" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + "]";
}

}  // namespace

RankEvents::RankEvents(const Trace& trace, ChromeFile& file)
    : trace_(trace), file_(file), cpu_(file.merged ? trace.rank * int64_t{1000} + 999 : std::max<int64_t>(trace.process, 1)) {
  for (const Collective& c : trace.collectives)
    if (c.kernel >= 0) by_kernel_.try_emplace(c.kernel, &c);
}

void RankEvents::write() {
  ops();
  scopes();
  units();
  steps();
  runtime();
  device_work();
  syncs();
  overheads();
  collectives();
  for (const MemoryEvent& event : trace_.memory)
    if (!event.before) instant(event);  // readers take every one for an allocation
  launch_arrows();
  backward_arrows();
  names();
}

const Collective* RankEvents::collective_of(int kernel) const {
  const auto at = by_kernel_.find(kernel);
  return at == by_kernel_.end() ? nullptr : at->second;
}

void RankEvents::ops() {
  int64_t index = 0;
  for (const CpuOp& op : trace_.cpu_ops) {
    const char* category = op.category == CpuOp::Category::User ? "user_annotation" : "cpu_op";
    complete(category, op.name, cpu_, op.thread, op.start_ns, op.end_ns, [&](JsonObject& args) {
      args.number("External id", static_cast<int64_t>(op.id));
      args.number("Record function id", 0);
      args.number("Ev Idx", index);
      if (op.sequence >= 0) args.number("Sequence number", op.sequence);
      if (op.sequence >= 0) args.number("Fwd thread id", op.forward_thread);
      if (!op.shapes.empty()) file_.replaced_names += append_list(args.key("Input Dims"), op.shapes);
      if (!op.dtypes.empty()) file_.replaced_names += append_list(args.key("Input type"), op.dtypes);
      if (op.flops > 0) args.real("Flops", op.flops);
    });
    ++index;
  }
}

void RankEvents::scopes() {
  for (const Scope& scope : trace_.scopes) {
    if (derived(scope)) continue;
    complete("user_annotation", scope_name(scope), cpu_, scope.thread, scope.start_ns, scope.end_ns, [&](JsonObject& args) {
      args.text("Kind", trace::name_of(scope.kind));
      if (scope.bytes != 0) args.number("Bytes", scope.bytes);
    });
  }
}

void RankEvents::units() {
  for (const Scope* scope : by_start(trace_.scopes)) {
    if (!derived(*scope)) continue;
    const int lane = lanes_.place({cpu_, kUnitRow + scope->thread}, scope->start_ns, scope->end_ns);
    const int64_t tid = kUnitRow * (lane + 1) + scope->thread;
    row_names_[{cpu_, tid}] = "units of thread " + std::to_string(scope->thread);
    complete("user_annotation", scope_name(*scope), cpu_, tid, scope->start_ns, scope->end_ns, {});
  }
}

void RankEvents::steps() {
  for (const StepMark& step : trace_.steps)
    complete("user_annotation", "ProfilerStep#" + std::to_string(step.step), cpu_, step.thread, step.start_ns, step.end_ns, {});
}

void RankEvents::runtime() {
  for (const Runtime& call : trace_.runtime)
    complete(call.driver ? "cuda_driver" : "cuda_runtime", call.name, cpu_, call.thread, call.start_ns, call.end_ns, [&](JsonObject& args) {
      args.number("correlation", call.correlation);
      if (call.op >= 0) args.number("External id", static_cast<int64_t>(op_id(call.op)));
    });
}

int64_t RankEvents::device_row(int64_t pid, int64_t stream, int64_t start, int64_t end) {
  const int lane = lanes_.place({pid, stream}, start, end);
  const int64_t tid = stream + lane * kOverlapRow;
  row_names_[{pid, tid}] = "stream " + std::to_string(stream) + (lane > 0 ? " (overlap " + std::to_string(lane) + ")" : "");
  return tid;
}

void RankEvents::device_work() {
  const auto kernels = by_start(trace_.kernels);
  const auto copies = by_start(trace_.copies);
  auto k = kernels.begin();
  auto c = copies.begin();
  const auto timed = [&](const auto& work) {
    if (work.start_ns != 0 && work.end_ns >= work.start_ns) return true;
    ++file_.untimed;
    return false;
  };
  while (k != kernels.end() || c != copies.end()) {
    const bool is_kernel = c == copies.end() || (k != kernels.end() && (*k)->start_ns <= (*c)->start_ns);
    const auto emit = [&](const auto& work, auto write) {
      if (!timed(work)) return;
      const int64_t tid = device_row(gpu(work.device), work.stream, work.start_ns, work.end_ns);
      first_work_.try_emplace(work.correlation, Anchor{gpu(work.device), tid, work.start_ns});
      write(tid);
    };
    if (is_kernel)
      emit(**k, [&](int64_t tid) { kernel(**k, tid); }), ++k;
    else
      emit(**c, [&](int64_t tid) { copy(**c, tid); }), ++c;
  }
}

void RankEvents::kernel(const Kernel& k, int64_t tid) {
  const Collective* collective = collective_of(static_cast<int>(&k - trace_.kernels.data()));
  complete("kernel", k.name, gpu(k.device), tid, k.start_ns, k.end_ns, [&](JsonObject& args) {
    if (k.op >= 0) args.number("External id", static_cast<int64_t>(op_id(k.op)));
    args.number("queued", k.queued_ns);
    args.number("device", k.device);
    args.number("context", k.context);
    args.number("stream", k.stream);
    args.number("correlation", k.correlation);
    args.number("registers per thread", k.registers);
    args.number("shared memory", k.shared_memory);
    for (const Device& device : trace_.devices) {
      if (device.id != k.device || device.sm_count <= 0 || device.warp_size <= 0) continue;
      const double blocks = double(k.grid[0]) * k.grid[1] * k.grid[2] / device.sm_count;
      args.real("blocks per SM", blocks);
      const int64_t threads = int64_t{k.block[0]} * k.block[1] * k.block[2];
      args.real("warps per SM", blocks * static_cast<double>((threads + device.warp_size - 1) / device.warp_size));
      args.number("est. achieved occupancy %", achieved_occupancy(k, device, blocks));
    }
    append_triple(args.key("grid"), k.grid);
    append_triple(args.key("block"), k.block);
    if (k.graph_node_id != 0) args.number("graph id", k.graph_id), args.number("graph node id", k.graph_node_id);
    if (k.scope >= 0) args.text("Unit", trace_.scopes[k.scope].name);
    if (collective == nullptr) return;
    args.text("Collective name", collective->op);
    args.text("Process Group Name", collective->comm);
    args.text("Process Group Description", collective->label);
    args.number("Seq", collective->sequence);
    args.number("Bytes", collective->bytes);
  });
}

void RankEvents::copy(const Copy& c, int64_t tid) {
  const bool memset = c.kind == Copy::Kind::Memset;
  complete(memset ? "gpu_memset" : "gpu_memcpy", copy_text(c.kind), gpu(c.device), tid, c.start_ns, c.end_ns, [&](JsonObject& args) {
    if (c.op >= 0) args.number("External id", static_cast<int64_t>(op_id(c.op)));
    args.number("device", c.device);
    args.number("context", c.context);
    args.number("stream", c.stream);
    args.number("correlation", c.correlation);
    args.number("bytes", c.bytes);
    const int64_t ns = c.end_ns - c.start_ns;
    args.real("memory bandwidth (GB/s)", ns > 0 ? static_cast<double>(c.bytes) / static_cast<double>(ns) : 0);
    if (c.scope >= 0) args.text("Unit", trace_.scopes[c.scope].name);
  });
}

void RankEvents::syncs() {
  for (const Sync* s : by_start(trace_.syncs)) {
    const int64_t row = kSyncRow + std::max(s->stream, 0);
    const int64_t tid = device_row(gpu(s->device), row, s->start_ns, s->end_ns);
    row_names_[{gpu(s->device), tid}] = s->stream < 0 ? "waits" : "waits of stream " + std::to_string(s->stream);
    complete("cuda_sync", sync_text(s->kind), gpu(s->device), tid, s->start_ns, s->end_ns, [&](JsonObject& args) {
      args.text("cuda_sync_kind", sync_text(s->kind));
      args.number("stream", s->stream);
      args.number("correlation", s->correlation);
      args.number("device", s->device);
      args.number("context", s->context);
      if (s->event_correlation != 0) args.number("wait_on_cuda_event_record_corr_id", s->event_correlation);
      if (s->event != 0) args.number("wait_on_cuda_event_id", s->event);
    });
  }
}

void RankEvents::overheads() {
  for (const Overhead* o : by_start(trace_.overheads)) {
    const int64_t pid = file_.merged ? cpu_ - 1 : -1;
    const int lane = lanes_.place({pid, 0}, o->start_ns, o->end_ns);
    row_names_[{pid, lane}] = "overhead";
    complete("overhead", o->kind, pid, lane, o->start_ns, o->end_ns, {});
  }
}

void RankEvents::collectives() {
  for (const Collective* c : by_start(trace_.collectives)) {
    const int64_t pid = c->on_device ? gpu(c->device) : cpu_;
    const int64_t row = kCollectiveRow + (c->on_device ? c->stream : c->thread);
    const int64_t tid = device_row(pid, row, c->start_ns, c->end_ns);
    row_names_[{pid, tid}] = "collectives";
    complete("collective", c->op + " " + c->label, pid, tid, c->start_ns, c->end_ns, [&](JsonObject& args) {
      args.text("Collective name", c->op);
      args.text("Process Group Name", c->comm);
      args.text("Label", c->label);
      args.number("Seq", c->sequence);
      args.number("Bytes", c->bytes);
    });
    anchors_.try_emplace({c->comm, c->sequence}, Anchor{pid, tid, c->start_ns});
  }
}

void RankEvents::launch_arrows() {
  const int64_t rank_bits = file_.merged ? int64_t{trace_.rank} << 32 : 0;
  std::set<int64_t> drawn;
  for (const Runtime& call : trace_.runtime) {
    const auto work = first_work_.find(call.correlation);
    if (work == first_work_.end() || !drawn.insert(call.correlation).second) continue;
    if (work->second.time_ns < call.start_ns) {
      ++file_.omitted_arrows;
      continue;
    }
    arrow('s', "ac2g", rank_bits + call.correlation, cpu_, call.thread, call.start_ns);
    arrow('f', "ac2g", rank_bits + call.correlation, work->second.pid, work->second.tid, work->second.time_ns);
  }
}

void RankEvents::backward_arrows() {
  const int64_t rank_bits = (file_.merged ? int64_t{trace_.rank} << 32 : 0) + (int64_t{1} << 52);
  std::unordered_map<int64_t, const CpuOp*> forward;
  const auto order = by_start(trace_.cpu_ops);
  for (const CpuOp* op : order) {
    if (op->sequence < 0) continue;
    if (op->category == CpuOp::Category::Op && op->forward_thread == 0) {
      forward[op->sequence] = op;
    } else if (const auto from = forward.find(op->sequence); op->category == CpuOp::Category::Backward && from != forward.end()) {
      const int64_t id = rank_bits + static_cast<int64_t>(op->id);
      arrow('s', "fwdbwd", id, cpu_, from->second->thread, from->second->start_ns);
      arrow('f', "fwdbwd", id, cpu_, op->thread, op->start_ns);
    }
  }
}

}  // namespace fsdpp::profiler

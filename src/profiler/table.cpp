#include "fsdpp/profiler/table.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace fsdpp::profiler {
namespace {

/// Sums of one operator call, with those inside it.
struct CallSums {
  int64_t cpu_self = 0, cuda_self = 0, cuda_total = 0;
  int64_t memory_total = 0, device_memory_total = 0;
};

std::string copy_name(Copy::Kind kind) {
  switch (kind) {
    case Copy::Kind::HostToDevice: return "Memcpy HtoD";
    case Copy::Kind::DeviceToHost: return "Memcpy DtoH";
    case Copy::Kind::DeviceToDevice: return "Memcpy DtoD";
    case Copy::Kind::PeerToPeer: return "Memcpy PtoP";
    case Copy::Kind::HostToHost: return "Memcpy HtoH";
    case Copy::Kind::Memset: return "Memset";
    case Copy::Kind::Other: break;
  }
  return "Memcpy";
}

/// Operators so that each comes before those inside it.
std::vector<int> outside_in(const Trace& trace) {
  std::vector<int> order(trace.cpu_ops.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const CpuOp &x = trace.cpu_ops[a], &y = trace.cpu_ops[b];
    return x.start_ns != y.start_ns ? x.start_ns < y.start_ns : x.end_ns > y.end_ns;
  });
  return order;
}

std::vector<CallSums> sum_calls(const Trace& trace, const std::vector<int>& order) {
  std::vector<CallSums> sums(trace.cpu_ops.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    const CpuOp& op = trace.cpu_ops[i];
    sums[i].cpu_self += op.end_ns - op.start_ns;
    if (op.parent >= 0) sums[op.parent].cpu_self -= op.end_ns - op.start_ns;
    sums[i].memory_total += op.bytes;
    sums[i].device_memory_total += op.device_bytes;
  }
  const auto add = [&](const auto& work) {
    if (work.op >= 0) sums[work.op].cuda_self += work.end_ns - work.start_ns;
  };
  for (const Kernel& kernel : trace.kernels) add(kernel);
  for (const Copy& copy : trace.copies) add(copy);
  for (CallSums& s : sums) s.cuda_total = s.cuda_self;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    const int parent = trace.cpu_ops[*at].parent;
    if (parent < 0) continue;
    sums[parent].cuda_total += sums[*at].cuda_total;
    sums[parent].memory_total += sums[*at].memory_total;
    sums[parent].device_memory_total += sums[*at].device_memory_total;
  }
  return sums;
}

class Grouping {
 public:
  Grouping(const Trace& trace, GroupBy by) : trace_(trace), by_(by) {}

  std::vector<Average> run() {
    const auto order = outside_in(trace_);
    const auto sums = sum_calls(trace_, order);
    row_of_op_.resize(trace_.cpu_ops.size());
    for (const int i : order) add_op(i, sums[i]);
    for (const Kernel& kernel : trace_.kernels) add_work(kernel, kernel.name);
    for (const Copy& copy : trace_.copies) add_work(copy, copy_name(copy.kind));
    return std::move(rows_);
  }

 private:
  [[nodiscard]] std::string unit(int scope) const {
    return scope >= 0 ? trace_.scopes[scope].name : std::string("(no unit)");
  }

  size_t row(const std::string& name, const std::string& shapes, bool on_device) {
    const auto [at, fresh] = index_.try_emplace({name, shapes, on_device}, rows_.size());
    if (fresh) {
      rows_.emplace_back();
      rows_.back().name = name;
      rows_.back().shapes = shapes;
      rows_.back().on_device = on_device;
    }
    return at->second;
  }

  void add_op(int i, const CallSums& sums) {
    const CpuOp& op = trace_.cpu_ops[i];
    const bool by_unit = by_ == GroupBy::Unit;
    const size_t r = row(by_unit ? unit(op.scope) : op.name, by_ == GroupBy::Shape ? op.shapes : "", false);
    row_of_op_[i] = r;
    Average& a = rows_[r];
    ++a.count;
    a.cpu_self_ns += sums.cpu_self;
    a.cpu_self_memory += op.bytes;
    a.cuda_self_memory += op.device_bytes;
    a.flops += op.flops;
    if (!by_unit) a.cuda_self_ns += sums.cuda_self;
    for (int up = op.parent; up >= 0; up = trace_.cpu_ops[up].parent)
      if (row_of_op_[up] == r) return;  // counted with the outer call
    a.cpu_total_ns += op.end_ns - op.start_ns;
    a.cpu_memory += sums.memory_total;
    a.cuda_memory += sums.device_memory_total;
    if (!by_unit) a.cuda_total_ns += sums.cuda_total;
  }

  template <class Work>
  void add_work(const Work& work, const std::string& name) {
    const bool by_unit = by_ == GroupBy::Unit;
    Average& a = rows_[row(by_unit ? unit(work.scope) : name, "", !by_unit)];
    if (!by_unit) ++a.count;
    a.cuda_self_ns += work.end_ns - work.start_ns;
    a.cuda_total_ns += work.end_ns - work.start_ns;
  }

  const Trace& trace_;
  GroupBy by_;
  std::vector<Average> rows_;
  std::vector<size_t> row_of_op_;
  std::map<std::tuple<std::string, std::string, bool>, size_t> index_;
};

}  // namespace

KeyAverages::KeyAverages(std::vector<Average> rows, const Trace& trace) : rows_(std::move(rows)), memory_(trace.profile_memory) {
  for (const Average& row : rows_) {
    cpu_time_ns_ += row.cpu_self_ns;
    shapes_ = shapes_ || !row.shapes.empty();
    flops_ = flops_ || row.flops > 0;
  }
  for (const Kernel& kernel : trace.kernels) cuda_time_ns_ += kernel.end_ns - kernel.start_ns;
  for (const Copy& copy : trace.copies) cuda_time_ns_ += copy.end_ns - copy.start_ns;
}

KeyAverages key_averages(const Trace& trace, GroupBy by) { return {Grouping(trace, by).run(), trace}; }

}  // namespace fsdpp::profiler

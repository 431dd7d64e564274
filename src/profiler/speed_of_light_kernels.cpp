#include <algorithm>
#include <unordered_map>

#include "fsdpp/profiler/speed_of_light.h"

namespace fsdpp::profiler {
namespace {

/// FLOPs and bytes of operators, shared among the compute kernels that each launched by their times.
struct Model {
  std::unordered_map<int, double> kernel_time_of_op;

  Model(const Trace& trace, const Analysis& analysis) {
    for (const Work& w : analysis.activities) {
      if (w.kernel < 0 || w.kind != Work::Kind::Compute) continue;
      const Kernel& k = trace.kernels[static_cast<size_t>(w.kernel)];
      if (k.op >= 0) kernel_time_of_op[k.op] += static_cast<double>(k.end_ns - k.start_ns);
    }
  }
  [[nodiscard]] double share(const Kernel& k) const {
    const double all = kernel_time_of_op.at(k.op);
    return all > 0 ? static_cast<double>(k.end_ns - k.start_ns) / all : 0;
  }
};

struct Gathered {
  KernelLight light;
  std::map<std::string, int64_t> ops;
  double flops = 0, bytes = 0;
};

void add_occurrence(Gathered& g, const Trace& trace, const Kernel& k, const Model& model) {
  if (k.op < 0) return;
  const CpuOp& op = trace.cpu_ops[static_cast<size_t>(k.op)];
  g.ops[op.name] += 1;
  g.flops += op.flops * model.share(k);
  g.bytes += model_bytes(op) * model.share(k);
}

void add_example(KernelLight& light, const Trace& trace, const Kernel& k) {
  if (k.op >= 0) light.shapes = trace.cpu_ops[static_cast<size_t>(k.op)].shapes;
  const auto device =
      std::find_if(trace.devices.begin(), trace.devices.end(), [&](auto& d) { return d.id == k.device; });
  if (device == trace.devices.end()) return;
  const Occupancy fit = occupancy(k, *device);
  if (fit.blocks <= 0) return;
  const double blocks = static_cast<double>(k.grid[0]) * k.grid[1] * k.grid[2];
  light.waves = blocks / (static_cast<double>(fit.blocks) * std::max(device->sm_count, 1));
  light.occupancy_percent = fit.percent;
  light.occupancy_limit = fit.limit;
}

void apply_model(KernelLight& light, double flops, double bytes, const Ceilings& ceilings) {
  if (flops > 0) light.flops = flops;
  if (bytes > 0) light.bytes = bytes;
  if ((flops <= 0 && bytes <= 0) || !ceilings.known() || light.total_ns <= 0) return;
  const double seconds = light.total_ns * 1e-9;
  light.source = Source::Modelled;
  light.compute_percent = std::min(100.0, 100 * flops / seconds / ceilings.flops_per_s);
  light.memory_percent = std::min(100.0, 100 * bytes / seconds / ceilings.bytes_per_s);
}

/// The host's lateness before each kernel of the list, by name.
std::unordered_map<std::string, double> late_by_name(const Trace& trace, const Analysis& analysis) {
  std::unordered_map<std::string, double> out;
  for (const IdlePiece& p : analysis.idle) {
    if (p.cause != IdleCause::LaunchBound || p.next < 0) continue;
    const Work& next = analysis.activities[static_cast<size_t>(p.next)];
    if (next.kernel >= 0)
      out[trace.kernels[static_cast<size_t>(next.kernel)].name] += static_cast<double>(p.end_ns - p.start_ns);
  }
  return out;
}

std::unordered_map<std::string, Gathered> gather(const Trace& trace, const Analysis& analysis) {
  std::unordered_map<std::string, Gathered> out;
  for (const KernelSummary& row : analysis.kernels) {
    KernelLight& light = out[row.name].light;
    light.name = row.name;
    light.count = row.count;
    light.total_ns = static_cast<double>(row.total_ns);
    light.communication = row.communication;
    if (row.example >= 0) add_example(light, trace, trace.kernels[static_cast<size_t>(row.example)]);
  }
  const Model model(trace, analysis);
  for (const Work& w : analysis.activities) {
    if (w.kernel < 0 || w.kind != Work::Kind::Compute) continue;
    const Kernel& k = trace.kernels[static_cast<size_t>(w.kernel)];
    if (const auto it = out.find(k.name); it != out.end()) add_occurrence(it->second, trace, k, model);
  }
  return out;
}

/// A kernel of collectives waits as long as the collectives that it carries, on average over the ranks.
void add_waits(KernelLight& light, const std::string& name, const Trace& trace, std::span<const CollectiveWait> waits) {
  std::map<std::pair<std::string, std::string>, bool> carried;
  for (const Collective& c : trace.collectives) {
    if (c.kernel >= 0 && trace.kernels[static_cast<size_t>(c.kernel)].name == name) carried[{c.label, c.op}] = true;
  }
  double longest = 0;
  for (const CollectiveWait& w : waits) {
    if (!carried.contains({w.label, w.op})) continue;
    const double mine = static_cast<double>(w.wait_ns) / std::max(trace.world_size, 1);
    light.wait_ns = light.wait_ns.value_or(0) + mine;
    if (mine > longest) {
      longest = mine;
      light.straggler = w.straggler;
    }
  }
}

}  // namespace

std::vector<KernelLight> speed_of_light(const Trace& trace, const Analysis& analysis, const Ceilings& ceilings,
                                        const Counters& counters, std::span<const CollectiveWait> waits) {
  auto gathered = gather(trace, analysis);
  const auto late = late_by_name(trace, analysis);
  std::vector<KernelLight> out;
  for (const KernelSummary& row : analysis.kernels) {
    Gathered& g = gathered[row.name];
    KernelLight& light = g.light;
    const auto most =
        std::max_element(g.ops.begin(), g.ops.end(), [](auto& a, auto& b) { return a.second < b.second; });
    if (most != g.ops.end()) light.op = most->first;
    if (const auto it = late.find(row.name); it != late.end()) light.idle_before_ns = it->second;
    if (light.communication) {
      add_waits(light, row.name, trace, waits);
    } else {
      apply_model(light, g.flops, g.bytes, ceilings);
    }
    if (const auto it = counters.by_kernel.find(row.name); it != counters.by_kernel.end()) {
      apply_counters(light, it->second, counters.source, ceilings);
    }
    out.push_back(std::move(light));
  }
  return out;
}

}  // namespace fsdpp::profiler

#include "dry_run.h"

#include <iomanip>

#include "fsdpp/shard/plan.h"
#include "text.h"

namespace minillm {
namespace {

constexpr int64_t kFp32 = 4, kBf16 = 2;

struct UnitPlan {
  fsdpp::shard::Plan plan;
  std::vector<std::string> names;
};

/// The layout that fully_shard gives a unit of these parameters: everything aligned for the narrowest dtype of its buffers.
UnitPlan plan_unit(const std::vector<NamedShape>& shapes, int64_t narrowest, int world_size) {
  constexpr int64_t kParamBytes = 16, kSliceBytes = 128;
  UnitPlan unit;
  std::vector<fsdpp::shard::ParamShape> params;
  for (const auto& shape : shapes) {
    unit.names.push_back(shape.name);
    params.push_back({shape.sizes[0], shape.sizes.size() > 1 ? shape.sizes[1] : 1});
  }
  fsdpp::shard::PlanOptions options;
  options.world_size = world_size;
  options.param_align = kParamBytes / narrowest;
  options.slice_align = kSliceBytes / narrowest;
  unit.plan = fsdpp::shard::make_plan(params, options);
  return unit;
}

int64_t gathered_width(const Options& options) { return options.precision == Precision::BF16 ? kBf16 : kFp32; }

std::string gigabytes(int64_t bytes) { return text(std::fixed, std::setprecision(3), static_cast<double>(bytes) / 1e9, " GB"); }

}  // namespace

MemoryPlan memory_plan(const Options& options, int world_size) {
  const auto width = gathered_width(options);
  const auto block = plan_unit(block_shapes(options.model), width, world_size).plan;
  const auto root = plan_unit(root_shapes(options.model), width, world_size).plan;
  const auto live_blocks = std::min<int64_t>(options.model.layers, 2);
  const auto live_numel = root.total_numel() + live_blocks * block.total_numel();
  const bool on_wire = world_size > 1;

  MemoryPlan memory;
  memory.parameters = kFp32 * (options.model.layers * block.slice_numel + root.slice_numel);
  memory.gradients = memory.parameters;
  memory.optimizer = 2 * memory.parameters;
  memory.gathered = on_wire || width != kFp32 ? width * live_numel : 0;
  memory.reduction = on_wire || options.grad_accum > 1 ? kFp32 * live_numel : 0;
  memory.unsharded_gradients = width * std::max(root.used_numel, block.used_numel);
  memory.activations = width * options.batch * options.seq * (options.model.layers * 16 * options.model.dim + 4 * options.model.vocab);
  return memory;
}

std::string dry_run_text(const Options& options, int world_size) {
  const auto width = gathered_width(options);
  const auto block = plan_unit(block_shapes(options.model), width, world_size);
  const auto root = plan_unit(root_shapes(options.model), width, world_size);
  const auto m = memory_plan(options, world_size);
  auto row = [](const char* what, const char* formula, int64_t bytes) {
    return text("  ", std::left, std::setw(22), what, std::right, std::setw(12), gigabytes(bytes), "  ", formula, "\n");
  };
  return text("MiniLLM: ", parameter_count(options.model), " parameters, ", options.model.layers + 1, " units, ", world_size,
              world_size == 1 ? " rank" : " ranks", ", gathered in ", width == kBf16 ? "bf16" : "fp32", "\n\n", "Each of the ",
              options.model.layers, " blocks (layers.N):\n", to_string(block.plan, block.names), "\nRoot:\n",
              to_string(root.plan, root.names), "\nMemory on each rank:\n", row("parameters", "shards of all units, fp32", m.parameters),
              row("gradients", "as the shards", m.gradients), row("optimizer", "two moments as the shards", m.optimizer),
              row("gathered buffers", "root and two blocks; nothing where the shard itself serves", m.gathered),
              row("gradient buffers", "root and two blocks, fp32; nothing for one rank without accumulation", m.reduction),
              row("unsharded gradients", "of the largest unit", m.unsharded_gradients),
              row("activations", "about (layers*16*dim + 4*vocab) * batch*seq elements", m.activations), row("total", "", m.total()));
}

}  // namespace minillm

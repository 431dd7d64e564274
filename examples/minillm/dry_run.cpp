#include "dry_run.h"

#include <algorithm>
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

fsdpp::UnitMemory unit_memory(const Options& options, const fsdpp::shard::Plan& plan) {
  const bool on_wire = plan.options.world_size > 1;
  const auto width = gathered_width(options);
  const bool keeps_cast = options.keep_cast_shard && width != kFp32;
  fsdpp::UnitMemory memory;
  memory.shard_bytes = memory.sharded_gradient_bytes = kFp32 * plan.slice_numel;
  memory.cast_shard_bytes = keeps_cast ? width * plan.slice_numel : 0;
  memory.gathered_bytes = on_wire || (width != kFp32 && !keeps_cast) ? width * plan.total_numel() : 0;
  memory.steps_in_backward = options.step_in_backward;
  memory.gradient_slots = on_wire ? 2 : 1;
  memory.gradient_bytes = kFp32 * plan.total_numel();
  memory.reduces_on_wire = on_wire;
  return memory;
}

std::string gigabytes(int64_t bytes) { return text(std::fixed, std::setprecision(3), static_cast<double>(bytes) / 1e9, " GB"); }

/// Logits, their logarithms and gradients; fused: a chunk of logits, and the weight's gradient in fp32.
int64_t head_bytes(const Options& options) {
  const auto& model = options.model;
  const auto width = gathered_width(options), tokens = options.batch * options.seq;
  if (!model.fused) return width * tokens * 4 * model.vocab;
  const auto chunk = std::min(tokens, std::max<int64_t>(1024, model.dim * kFp32 / width));
  return width * chunk * model.vocab + kFp32 * model.vocab * model.dim;
}

/// The head; or, once backward has begun, gradients that are written in place, and what the last feed-forward layer makes again.
int64_t working_bytes(const Options& options, const fsdpp::UnitMemory& block, const fsdpp::UnitMemory& root) {
  const auto& model = options.model;
  const auto tokens_bytes = gathered_width(options) * options.batch * options.seq;
  if (!model.fused) return head_bytes(options) + gathered_width(options) * std::max(model.vocab * model.dim, 12 * model.dim * model.dim);
  const bool in_place = !block.reduces_on_wire && options.grad_accum == 1;
  const auto gradients = in_place ? block.sharded_gradient_bytes + root.sharded_gradient_bytes : 0;
  return std::max(head_bytes(options), gradients + 8 * model.dim * tokens_bytes);
}

const char* activations_formula(const ModelConfig& model) {
  if (model.fused) return model.recompute ? "(layers + 12)*dim * batch*seq elements" : "layers*12*dim * batch*seq elements";
  return model.recompute ? "about (layers + 16)*dim * batch*seq elements" : "about layers*16*dim * batch*seq elements";
}
const char* working_formula(const ModelConfig& model) {
  return model.fused ? "logits of a chunk and the head's gradient; or gradients of root and block, 8*dim * batch*seq elements"
                     : "4*vocab * batch*seq elements, gradients of the largest parameters";
}

}  // namespace

MemoryPlan memory_plan(const Options& options, int world_size) {
  const auto& model = options.model;
  const auto width = gathered_width(options);
  const auto block = plan_unit(block_shapes(model), width, world_size).plan;
  const auto root = plan_unit(root_shapes(model), width, world_size).plan;
  std::vector<fsdpp::UnitMemory> units(static_cast<size_t>(model.layers), unit_memory(options, block));
  units.push_back(unit_memory(options, root));
  units.back().keeps_gathered = true;

  MemoryPlan memory;
  memory.engine = fsdpp::memory_formula(units, options.grad_accum > 1);
  memory.optimizer = 2 * memory.engine.shards;
  const auto of_block = model.fused ? 12 : 16;
  const auto blocks = model.recompute ? model.layers + of_block : model.layers * of_block;  // with recomputation: every input, and one block
  memory.activations = width * options.batch * options.seq * blocks * model.dim;
  memory.activations_of_a_block = width * options.batch * options.seq * of_block * model.dim;
  memory.working = working_bytes(options, units.front(), units.back());
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
              to_string(root.plan, root.names), "\nMemory on each rank, at most:\n",
              row("parameters", "shards of all units, fp32", m.engine.shards),
              row("shards in bf16", "kept with --keep-cast-shard", m.engine.cast_shards),
              row("gradients", options.step_in_backward ? "of two blocks and the root" : "as the shards", m.engine.sharded_gradients),
              row("optimizer", "two moments as the shards", m.optimizer),
              row("gathered buffers", "two blocks and the root; none where the shard itself serves", m.engine.gathered),
              row("gradient buffers", "two blocks and the root, fp32; all units with --grad-accum; else none on one rank",
                  m.engine.gradients),
              row("activations", activations_formula(options.model), m.activations),
              row("working memory", working_formula(options.model), m.working),
              row("total", "with the larger of: activations and working memory; gradients and a block's activations", m.total()));
}

}  // namespace minillm

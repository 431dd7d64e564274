#include "dry_run.h"

#include <algorithm>
#include <iomanip>

#include "fsdpp/comm/communicator.h"
#include "fsdpp/shard/plan.h"
#include "text.h"

namespace minillm {
namespace {

constexpr int64_t kFp32 = 4, kBf16 = 2;
constexpr int64_t kCublasWorkspace = int64_t{32} << 20;  // of a thread: forward's, and backward's on CUDA

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

int64_t reduce_width(const Options& options) { return options.reduce_bf16 ? kBf16 : kFp32; }

fsdpp::UnitMemory unit_memory(const Options& options, const fsdpp::shard::Plan& plan) {
  const bool on_wire = plan.options.world_size > 1;
  const auto width = gathered_width(options);
  const bool keeps_cast = options.keep_cast_shard && width != kFp32;
  fsdpp::UnitMemory memory;
  memory.shard_bytes = kFp32 * plan.slice_numel;
  memory.sharded_gradient_bytes =
      (options.step_in_backward && !on_wire ? reduce_width(options) : kFp32) * plan.slice_numel;
  memory.cast_shard_bytes = keeps_cast ? width * plan.slice_numel : 0;
  memory.reserves_slots = options.symmetric_buffers && on_wire;
  const auto taken = [&](int64_t bytes) {  // registered memory comes in multiples
    const auto granule = memory.reserves_slots && options.cuda ? fsdpp::comm::kRegisteredGranule : 1;
    return (bytes + granule - 1) / granule * granule;
  };
  memory.gathered_bytes = on_wire || (width != kFp32 && !keeps_cast) ? taken(width * plan.total_numel()) : 0;
  memory.steps_in_backward = options.step_in_backward;
  memory.gradient_slots = on_wire ? 2 : 1;
  memory.gathers_ahead = on_wire;
  memory.gradient_bytes = taken(reduce_width(options) * plan.total_numel());
  memory.reduces_on_wire = on_wire;
  return memory;
}

std::string gigabytes(int64_t bytes) { return text(std::fixed, std::setprecision(3), static_cast<double>(bytes) / 1e9, " GB"); }

/// What the moments of a step are made of.
struct Sizes {
  int64_t tokens;   ///< of a micro-batch
  int64_t hidden;   ///< bytes of an activation of width dim
  int64_t width;    ///< bytes of an element of an activation
  int64_t saved;    ///< activations of width dim that a block keeps for its backward
  int64_t in_block; ///< the same while backward works on the feed-forward layer: its gradients, and what is made again
  int64_t vocabulary;  ///< elements of embedding and of head
};

Sizes sizes_of(const Options& options) {
  const auto& model = options.model;
  const auto tokens = options.batch * options.seq, width = gathered_width(options);
  const int64_t saved = !model.fused ? 16 : model.recompute_norms ? 10 : 12;
  return {.tokens = tokens, .hidden = width * tokens * model.dim, .width = width, .saved = saved, .in_block = 9,
          .vocabulary = model.vocab * model.dim};
}

/// Logits, their logarithms and gradients; fused: a chunk of logits, the weight's gradient in fp32 unless it has its place in a
/// gradient buffer, the input and its gradient.
int64_t head_bytes(const Options& options, const Sizes& s, const fsdpp::UnitMemory& head) {
  if (!options.model.fused) return 4 * s.width * s.tokens * options.model.vocab + 2 * s.hidden;
  const auto most = std::max<int64_t>(1024, options.model.dim * kFp32 / s.width), chunks = (s.tokens + most - 1) / most;
  const bool has_place = head.reduces_on_wire && options.grad_accum == 1;
  return s.width * (s.tokens + chunks - 1) / chunks * options.model.vocab + (has_place ? 0 : kFp32 * s.vocabulary) + 2 * s.hidden;
}

/// The head's gradient unless it was applied, the block's where it is written in place, what the block computes again and works with.
int64_t last_block_bytes(const Options& options, const Sizes& s, const fsdpp::UnitMemory& head, const fsdpp::UnitMemory& block) {
  const bool in_place = !block.reduces_on_wire && options.grad_accum == 1;
  const auto of_head = options.step_in_backward ? 0 : head.sharded_gradient_bytes;
  const auto gradients = of_head + (in_place ? block.sharded_gradient_bytes : 0);
  return gradients + s.hidden * (s.in_block + (options.model.recompute ? s.saved - 1 : 0));
}

/// While backward works on the first block, or on the embedding, of which LibTorch's operator (not fused) makes the gradient in memory of
/// its own.
int64_t last_steps_bytes(const Options& options, const Sizes& s, const fsdpp::UnitMemory& embedding, const fsdpp::UnitMemory& block,
                         int64_t all) {
  const bool steps = options.step_in_backward;
  const auto before_first = all - embedding.sharded_gradient_bytes - (block.reduces_on_wire ? block.sharded_gradient_bytes : 0);
  const auto in_first = (steps ? block.sharded_gradient_bytes : before_first) + s.hidden * (s.saved + s.in_block);
  const auto own = options.model.fused ? 0 : s.width * s.vocabulary;
  const auto in_embedding = (steps ? embedding.sharded_gradient_bytes : all) + own + s.hidden;
  return std::max(in_first, in_embedding);
}

const char* activations_formula(const ModelConfig& model) {
  if (model.recompute) return "layers*dim * batch*seq elements";
  if (model.recompute_norms) return "layers*10*dim * batch*seq elements";
  return model.fused ? "layers*12*dim * batch*seq elements" : "about layers*16*dim * batch*seq elements";
}
const char* head_formula(const ModelConfig& model) {
  return model.fused ? "logits of a chunk, the head's gradient in fp32, 2*dim * batch*seq elements"
                     : "about (4*vocab + 2*dim) * batch*seq elements";
}

}  // namespace

MemoryPlan memory_plan(const Options& options, int world_size) {
  const auto& model = options.model;
  const auto width = gathered_width(options);
  const auto vocabulary = plan_unit(vocabulary_shapes(model), width, world_size).plan;
  const auto embedding = unit_memory(options, vocabulary);
  auto head = unit_memory(for_head(options, world_size), vocabulary);
  head.keeps_gathered = true;
  const auto block = unit_memory(options, plan_unit(block_shapes(model), width, world_size).plan);
  std::vector<fsdpp::UnitMemory> units(static_cast<size_t>(model.layers), block);
  units.insert(units.begin(), embedding);
  units.push_back(head);

  const auto sizes = sizes_of(options);
  int64_t all_gradients = 0;
  for (const auto& unit : units) all_gradients += unit.sharded_gradient_bytes;
  MemoryPlan memory;
  memory.engine = fsdpp::memory_formula(units, options.grad_accum > 1);
  memory.optimizer = 2 * memory.engine.shards;
  memory.libraries = options.cuda ? 2 * kCublasWorkspace : 0;
  memory.activations = sizes.hidden * model.layers * (model.recompute ? 1 : sizes.saved);
  memory.head = head_bytes(options, sizes, head);
  memory.last_block = last_block_bytes(options, sizes, head, block);
  memory.last_steps = last_steps_bytes(options, sizes, embedding, block, all_gradients);
  return memory;
}

std::string dry_run_text(const Options& options, int world_size) {
  const auto width = gathered_width(options);
  const auto block = plan_unit(block_shapes(options.model), width, world_size);
  const auto vocabulary = plan_unit(vocabulary_shapes(options.model), width, world_size);
  const auto m = memory_plan(options, world_size);
  const char* gradients = options.step_in_backward ? "a block's gradients, and 9*dim * batch*seq elements"
                                                   : "gradients of head and a block, and 9*dim * batch*seq elements";
  auto row = [](const char* what, const char* formula, int64_t bytes) {
    return text("  ", std::left, std::setw(22), what, std::right, std::setw(12), gigabytes(bytes), "  ", formula, "\n");
  };
  return text(
      "MiniLLM: ", parameter_count(options.model), " parameters, ", options.model.layers + 2, " units, ", world_size,
      world_size == 1 ? " rank" : " ranks", ", gathered in ", width == kBf16 ? "bf16" : "fp32", "\n\n", "Each of the ",
      options.model.layers, " blocks (layers.N):\n", to_string(block.plan, block.names), "\nembed and head, each:\n",
      to_string(vocabulary.plan, vocabulary.names), "\nMemory on each rank, at most:\n",
      row("parameters", "shards of all units, fp32", m.engine.shards),
      row("shards in bf16", "kept with --keep-cast-shard", m.engine.cast_shards),
      row("optimizer", "two moments as the shards", m.optimizer),
      row("gathered buffers",
          "two blocks, embedding and head (one rank: a block, one of these two); none where the shard itself serves",
          m.engine.gathered),
      row("gradient buffers",
          "two blocks, embedding and head, in the reduce dtype; all units with --grad-accum; else none on one rank",
          m.engine.gradients),
      row("libraries", "cuBLAS's workspaces of two threads, on Hopper", m.libraries), "and the largest of\n",
      row("  forward, at the head", activations_formula(options.model), m.activations + m.head),
      row("", head_formula(options.model), m.head),
      row("  backward begins", "the same activations", m.activations + m.last_block), row("", gradients, m.last_block),
      row("  backward ends", "gradients and a block's activations, or those of the embedding", m.last_steps),
      row("total", "", m.total()));
}

}  // namespace minillm

#include "ops/kernel_use.h"

#include <torch/csrc/autograd/graph_task.h>

#include "engine/autograd_edges.h"
#include "engine/registry.h"
#include "engine/unit.h"

namespace fsdpp::ops {

void expect_memory(const at::Tensor& parameter, const char* op) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  auto unit = engine::find_unit(parameter);
  if (!unit && in_backward) unit = engine::accumulated_parameter(parameter).unit;  // recomputed: no longer the handle
  if (!unit || unit->serves_operators(parameter)) return;
  FSDPP_ENFORCE(in_backward, UsageError,
                "{} was called with parameter '{}' while it is sharded: expected it inside a call of its module through the "
                "holder, got it outside. Try: call module(x), not module->forward(x), or unshard() the unit first.",
                op, unit->name_of(parameter));
  unit->gather_on_demand();
}

void expect_alike(const char* op, std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  FSDPP_ENFORCE((first.is_cpu() || first.is_cuda()) && shard::has_kernel_dtype(first.scalar_type()), UsageError,
                "{}: expected float32, float64, float16 or bfloat16 on the CPU or on CUDA, got {} on {}", op,
                c10::toString(first.scalar_type()), first.device().str());
  for (const at::Tensor& t : tensors) {
    if (!t.defined()) continue;
    FSDPP_ENFORCE(t.scalar_type() == first.scalar_type() && t.device() == first.device(), UsageError,
                  "{}: expected all tensors as the first, {} on {}, got one of {} on {}. Try: .to()", op,
                  c10::toString(first.scalar_type()), first.device().str(), c10::toString(t.scalar_type()), t.device().str());
  }
}

}  // namespace fsdpp::ops

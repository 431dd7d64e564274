#include "engine/deferred_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <unordered_set>

#include "engine/deferred_call.h"
#include "engine/init_fill.h"

namespace fsdpp::engine {
namespace {

using c10::IValue;
using Names = std::unordered_set<std::string_view>;

void record_writes(const Call& call) {
  if (changes_metadata_only(call.op)) return;
  const auto& declared = call.op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (!declared[i].alias_info() || !declared[i].alias_info()->isWrite()) continue;
    each_tensor(call.args[i], [&](const at::Tensor& t) {
      if (recorded_steps(t)) record_write(call, t, declared[i].name() == "self" && call.args[i].isTensor());
    });
  }
}

bool is_factory(const Call& call) {
  const auto* device = call.find("device");
  if (!device || any_tensor(call.args)) return false;
  return device->isNone() || (device->isDevice() && device->toDevice().is_cpu());
}

bool copies_to_cpu(const Call& call) {
  const auto* self = call.tensor("self");
  const auto* device = call.find("device");
  return (call.name() == "aten::to" || call.name() == "aten::_to_copy") && self && recorded_steps(*self) && device &&
         device->isDevice() && device->toDevice().is_cpu();
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, const std::vector<IValue>& args) {
  torch::jit::drop(*stack, args.size());
  for (const auto& a : args) stack->push_back(a);
  op.redispatchBoxed(below, stack);
}

// A factory on the meta device; where the operator has no kernel for it, as it was called. True if on meta.
bool run_factory(const Call& call, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  auto args = call.args;
  set_argument(call, args, "device", c10::Device(c10::kMeta));
  set_argument(call, args, "pin_memory", IValue());
  const size_t base = stack->size() - args.size();
  try {
    run(call.op, below, stack, args);
    return true;
  } catch (const c10::NotImplementedError&) {
    stack->resize(base);
    for (const auto& a : call.args) stack->push_back(a);
    call.op.redispatchBoxed(below, stack);
    return false;
  }
}

// What a recorded tensor is, or zeros where that is random or unknown; a large one is left alone.
at::Tensor stand_in(const at::Tensor& t) {
  if (!recorded_steps(t) || t.nbytes() > kReplayBytes) return t;
  auto snapshot = snapshot_of(t);
  return is_deterministic(snapshot) ? value_of(snapshot) : at::zeros(t.sizes(), t.options().device(c10::kCPU));
}

IValue stand_in(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) return stand_in(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : value.toTensorVector()) list.push_back(stand_in(t));
  return list;
}

// Some operators have no kernel for meta tensors. One that writes to `self` leaves its shape alone; another runs on the CPU, for the
// shapes of what it returns.
void run_without_meta_kernel(const Call& call, torch::jit::Stack* stack) {
  const auto& schema = call.op.schema();
  if (schema.is_mutable()) {
    const auto* self = call.tensor("self");
    if (!self || schema.returns().size() != 1 || !schema.returns()[0].alias_info()) throw;  // NOLINT: within a handler
    stack->emplace_back(*self);
    return;
  }
  for (const auto& a : call.args) stack->push_back(stand_in(a));
  call.op.callBoxed(stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().is_cpu()) continue;
    const auto& t = value.toTensor();
    value = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
  }
}

void run_on_meta(const Call& call, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  auto args = call.args;
  if (copies_to_cpu(call)) set_argument(call, args, "device", IValue());
  const size_t base = stack->size() - args.size();
  try {
    run(call.op, below, stack, args);
  } catch (const c10::NotImplementedError&) {
    stack->resize(base);
    run_without_meta_kernel(call, stack);
  }
}

void record_outputs(const Call& call, const torch::jit::Stack& stack) {
  const size_t count = call.op.schema().returns().size();
  for (size_t i = 0; i < count; ++i) {
    const auto& value = stack[stack.size() - count + i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& t = value.toTensor();
    if (t.is_meta() && t.has_storage() && t.layout() == c10::kStrided && !recorded_steps(t)) start_record(t, steps_of_output(call, t, i));
  }
}

}  // namespace

bool reads_recorded(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  bool found = false;
  for (size_t i = stack.size() - count; i < stack.size() && !found; ++i)
    each_tensor(stack[i], [&](const at::Tensor& t) { found = found || recorded_steps(t) != nullptr; });
  return found;
}

bool changes_metadata_only(const c10::OperatorHandle& op) {
  static const Names kNames = {"aten::requires_grad_", "aten::detach_",  "aten::set_data",    "aten::retain_grad", "aten::t_",
                               "aten::transpose_",     "aten::squeeze_", "aten::unsqueeze_",  "aten::swapdims_",   "aten::swapaxes_",
                               "aten::as_strided_",    "aten::rename_",  "aten::_version"};
  return kNames.contains(op.operator_name().name);
}

void run_recorded(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, bool deferring) {
  const Call call(op, torch::jit::last(*stack, op.schema().arguments().size()));
  if (deferring && is_factory(call)) {
    if (run_factory(call, below, stack)) record_outputs(call, *stack);
    return;
  }
  if (!reads_recorded(op, *stack)) return op.redispatchBoxed(below, stack);
  run_on_meta(call, below, stack);
  const at::NoGradGuard no_grad;
  record_writes(call);
  record_outputs(call, *stack);
}

}  // namespace fsdpp::engine

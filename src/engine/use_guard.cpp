#include "engine/use_guard.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "base/enforce.h"
#include "engine/deferred_ops.h"
#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;
constexpr c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

struct Owners {
  std::shared_mutex mutex;
  std::unordered_map<const void*, std::weak_ptr<Unit>> by_storage;
};
Owners& owners() {
  static auto* instance = new Owners;  // parameters may outlive static destructors
  return *instance;
}

thread_local int shard_access = 0;

std::shared_ptr<Unit> owner_of(const at::Tensor& t) {
  auto& o = owners();
  std::shared_lock lock(o.mutex);
  auto it = o.by_storage.find(t.storage().unsafeGetStorageImpl());
  return it == o.by_storage.end() ? nullptr : it->second.lock();
}

// Operators that only a forward would run on a parameter: an error on a shard even when no graph is recorded.
bool is_forward_op(std::string_view name) {
  static constexpr std::array<std::string_view, 21> kNames = {
      "fsdpp::product",    "fsdpp::silu_product", "fsdpp::silu_product_backward",
      "aten::linear",      "aten::matmul",        "aten::mm",
      "aten::addmm",       "aten::bmm",           "aten::baddbmm",
      "aten::mv",          "aten::addmv",         "aten::embedding",
      "aten::convolution", "aten::conv1d",        "aten::conv2d",
      "aten::conv3d",      "aten::layer_norm",    "aten::group_norm",
      "aten::batch_norm",  "aten::rms_norm",      "aten::bilinear"};
  for (auto n : kNames)
    if (n == name) return true;
  return false;
}

bool records_graph(const at::Tensor& t, const c10::OperatorHandle& op) {
  if (!c10::GradMode::is_enabled() || !t.requires_grad()) return false;
  std::string_view name = op.operator_name().name;
  if (name == "aten::detach" || name == "aten::alias" || name == "aten::requires_grad_" || name == "aten::to") return false;
  const auto& returns = op.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](auto& r) { return r.type()->kind() != c10::TypeKind::BoolType; });
}

void check_use(const at::Tensor& t, const c10::OperatorHandle& op) {
  auto unit = owner_of(t);
  if (!unit || unit->serves_operators(t)) return;
  if (t.is_meta() && op.schema().is_mutable() && !changes_metadata_only(op))
    fail<UsageError>("{} was called with parameter '{}', which has no memory yet. Try: fsdpp::materialize(*model) first, or initialise "
                     "it before fully_shard.", op.operator_name().name, unit->name_of(t));
  if (torch::autograd::get_current_graph_task_id() >= 0) {
    unit->gather_on_demand();
    return;
  }
  const auto& name = op.operator_name().name;
  if (!unit->is_shard_of(t))
    fail<UsageError>("{} was called with a view of a parameter of unit '{}' whose gathered memory has been given back. Views of "
                     "a parameter are valid until its module's forward returns. Try: clone() the view, or unshard() the unit.",
                     name, unit->name());
  if (is_forward_op(name) || records_graph(t, op))
    fail<UsageError>("{} was called with parameter '{}' while it is sharded: expected it inside a call of its module through "
                     "the holder, got it outside. Try: call module(x), not module->forward(x) (declare the module with "
                     "FSDPP_MODULE or call it by fsdpp::call), or unshard() the unit first; to work on the local shard use "
                     "at::NoGradGuard.", name, unit->name_of(t));
}

void check_value(const c10::IValue& value, const c10::OperatorHandle& op) {
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    if (t.defined() && t.unsafeGetTensorImpl()->key_set().has(kKey)) check_use(t, op);
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector())
      if (t.defined() && t.unsafeGetTensorImpl()->key_set().has(kKey)) check_use(t, op);
  } else if (value.isOptionalTensorList() || value.isList()) {
    for (const c10::IValue& v : value.toListRef())
      if (v.isTensor()) check_value(v, op);
  }
}

// Written by an operator, also through a view with a version of its own (p.data()): a gathered copy is no longer current.
void note_writes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  auto note = [](const at::Tensor& t) {
    if (!t.defined() || !t.unsafeGetTensorImpl()->key_set().has(kKey)) return;
    if (auto unit = owner_of(t); unit && unit->is_shard_of(t)) unit->note_shard_written();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    const auto& value = stack[stack.size() - arguments.size() + i];
    if (value.isTensor()) note(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) note(t);
  }
}

void guard_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (shard_access == 0)
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) check_value(value, op);
  note_writes(op, *stack);
  const bool deferring = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::ExcludeDispatchKeyGuard once(kKey);
  if (deferring || reads_recorded(op, *stack))
    run_recorded(op, keys & kBelow, stack, deferring);
  else
    op.redispatchBoxed(keys & kBelow, stack);
}

c10::DispatchKey backend_of(const c10::Storage& storage) {
  if (storage.device().is_meta()) return c10::DispatchKey::Meta;
  return storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

at::Tensor make_on(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes, int64_t offset, c10::DispatchKeySet keys) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, caffe2::TypeMeta::fromScalarType(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}

}  // namespace

at::Tensor make_tensor_on(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes, int64_t storage_offset) {
  return make_on(storage, dtype, sizes, storage_offset, c10::DispatchKeySet(backend_of(storage)));
}

at::Tensor make_guarded_tensor_on(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes, int64_t storage_offset) {
  return make_on(storage, dtype, sizes, storage_offset, c10::DispatchKeySet({backend_of(storage), kKey}));
}

at::Tensor make_guarded_view(const at::Tensor& tensor) {
  auto view = make_guarded_tensor_on(tensor.storage(), tensor.scalar_type(), {0}, 0);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

void point_handle(const at::Tensor& handle, const at::Tensor& view) {
  handle.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

void guard_storage(const void* storage, std::weak_ptr<Unit> unit) {
  std::unique_lock lock(owners().mutex);
  owners().by_storage[storage] = std::move(unit);
}

void unguard_storage(const void* storage) noexcept {
  std::unique_lock lock(owners().mutex);
  owners().by_storage.erase(storage);
}

ShardAccess::ShardAccess() { ++shard_access; }
ShardAccess::~ShardAccess() { --shard_access; }

}  // namespace fsdpp::engine

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fsdpp::engine::guard_fallback>());
}

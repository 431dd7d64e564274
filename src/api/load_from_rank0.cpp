#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "base/enforce.h"
#include "engine/comm_context.h"
#include "engine/init_fill.h"
#include "engine/use_guard.h"
#include "fsdpp/api/deferred_init.h"
#include "fsdpp/api/unit_handle.h"

namespace fsdpp {
namespace {

using Source = std::function<at::Tensor(const std::string& name)>;

/// A tensor of the model and the part of it that this rank keeps.
struct Target {
  std::string name;
  at::Tensor local;
  std::vector<int64_t> global_sizes;
  shard::Range range;
};

struct Targets {
  std::vector<Target> items;
  std::shared_ptr<comm::Mesh> mesh;
};

Targets collect(const torch::nn::Module& module) {
  Targets targets;
  for (const auto& unit : units(module))
    if (!unit.is_sharded()) unit.reshard();
  std::unordered_map<const c10::TensorImpl*, shard::ShardedParam> sharded;
  for (auto& p : sharded_parameters(module)) {
    if (!targets.mesh) targets.mesh = p.mesh;
    FSDPP_ENFORCE(p.mesh == targets.mesh, UsageError, "load_from_rank0: parameter '{}' lies on mesh '{}', others on '{}'; expected one mesh",
                  p.name, p.mesh->name(), targets.mesh->name());
    sharded.emplace(p.handle.unsafeGetTensorImpl(), p);
  }
  std::unordered_set<const c10::TensorImpl*> seen;
  auto add = [&](const torch::OrderedDict<std::string, at::Tensor>& named) {
    for (const auto& item : named) {
      const auto& t = item.value();
      if (!t.defined() || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
      FSDPP_ENFORCE(!t.is_meta(), UsageError, "load_from_rank0: '{}' has no memory yet. Try: materialize(module, {{.fill = false}}) before.", item.key());
      const auto found = sharded.find(t.unsafeGetTensorImpl());
      if (found == sharded.end())
        targets.items.push_back({item.key(), t, t.sizes().vec(), {0, t.numel()}});
      else
        targets.items.push_back({item.key(), t, found->second.global_sizes, found->second.local()});
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return targets;
}

at::Tensor checked_value(const Source& source, const Target& target) {
  const auto value = source(target.name);
  FSDPP_ENFORCE(value.defined() && value.sizes() == at::IntArrayRef(target.global_sizes), UsageError,
                "load_from_rank0: '{}' has shape [{}], the source gave {}", target.name, fmt::join(target.global_sizes, ", "),
                value.defined() ? fmt::format("[{}]", fmt::join(value.sizes(), ", ")) : "nothing");
  return value.detach().contiguous().view({-1});
}

/// Rank 0 tells whether it has the value; every rank throws if not.
void agree(comm::Mesh* mesh, const Target& target, const std::exception_ptr& failure) {
  bool failed = failure != nullptr;
  if (mesh) {
    const auto flag = at::full({1}, int64_t{failed}, at::TensorOptions(mesh->device()).dtype(at::kLong));
    engine::broadcast_from_rank0(*mesh, {flag});
    failed = flag.item<int64_t>() != 0;
  }
  if (failure) std::rethrow_exception(failure);
  FSDPP_ENFORCE(!failed, UsageError, "load_from_rank0: rank 0 could not give '{}'; its own message says why", target.name);
}

/// Sends one tensor in blocks; each rank copies what overlaps with its range.
void distribute(comm::Mesh* mesh, const Target& target, const at::Tensor& value) {
  int64_t numel = 1;
  for (auto size : target.global_sizes) numel *= size;
  const auto& local = target.local;
  const auto device = local.device();
  auto flat = local.is_contiguous() ? local.detach().view({-1}) : at::empty({target.range.size()}, local.options());
  const int64_t longest = std::min(numel, engine::kStagingBytes / static_cast<int64_t>(local.element_size()));
  const auto room = at::empty({longest}, at::TensorOptions(device).dtype(local.scalar_type()));
  for (int64_t begin = 0; begin < numel; begin += longest) {
    const int64_t end = std::min(numel, begin + longest);
    const auto block = room.narrow(0, 0, end - begin);
    if (value.defined()) block.copy_(value.narrow(0, begin, end - begin));
    if (mesh) engine::broadcast_from_rank0(*mesh, {block});
    const int64_t first = std::max(begin, target.range.begin), last = std::min(end, target.range.end);
    if (first < last) flat.narrow(0, first - target.range.begin, last - first).copy_(block.narrow(0, first - begin, last - first));
  }
  if (!local.is_contiguous()) local.detach().copy_(flat.view(local.sizes()));
}

}  // namespace

void load_from_rank0(torch::nn::Module& module, const Source& source) {
  const at::NoGradGuard no_grad;
  const DeferredInit::Pause pause;
  const auto targets = collect(module);
  auto* mesh = targets.mesh.get();
  const bool is_source = !mesh || (mesh->shard_rank() == 0 && mesh->replicate_rank() == 0);
  for (const auto& target : targets.items) {
    at::Tensor value;
    std::exception_ptr failure;
    try {
      if (is_source) value = checked_value(source, target);
    } catch (...) {
      failure = std::current_exception();
    }
    agree(mesh, target, failure);
    const engine::ShardAccess access;
    distribute(mesh, target, value);
  }
}

}  // namespace fsdpp

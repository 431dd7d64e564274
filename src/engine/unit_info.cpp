// What a unit says of itself: descriptions, memory, metadata, answers to the use guard.
#include <algorithm>

#include "base/enforce.h"
#include "engine/unit.h"

namespace fsdpp::engine {

std::string Unit::describe() const {
  auto text = fmt::format("unit '{}' group after forward {} borrows {}{}\n", name_, group_after_forward(), borrowed_.size(),
                          context_->symmetric_buffers() ? " symmetric buffers" : "");
  for (auto& b : buffers_)
    for (auto& p : b->params()) {
      auto h = p.handle();
      text += fmt::format("unit '{}' parameter '{}' {} {} {} gathered as {} reduced in {}\n", name_, p.name, fmt::join(p.sizes, "x"),
                          c10::toString(b->config().dtype), h.defined() && h.requires_grad() ? "trainable" : "frozen",
                          c10::toString(b->config().gathered_dtype), c10::toString(b->config().reduce_dtype));
    }
  return text;
}

size_t Unit::param_count() const {
  size_t count = 0;
  for (auto& b : buffers_) count += b->params().size();
  return count;
}

bool Unit::is_shard_of(const at::Tensor& tensor) const {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(buffers_.begin(), buffers_.end(), [&](auto& b) { return b->shard_storage() == storage; });
}

bool Unit::serves_operators(const at::Tensor& tensor) const {
  if (state_ == UnitState::Shown) return true;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (auto& b : buffers_) {
    if (storage != b->gathered_storage()) continue;
    return b->aliased() ? in_backward() : state_ == UnitState::Cached;
  }
  return false;
}

std::string Unit::name_of(const at::Tensor& tensor) const {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (auto [buffer, i] = find(tensor); buffer) return buffer->params()[i].name;
  for (auto& b : buffers_)
    for (auto& p : b->params()) {
      int64_t begin = p.shard_view.storage_offset(), end = begin + p.shard_view.numel();
      if (storage == b->shard_storage() && tensor.storage_offset() >= begin && tensor.storage_offset() < end) return p.name;
    }
  return name_;
}

at::Tensor Unit::local_shard(const at::Tensor& parameter) const {
  auto [buffer, i] = find(parameter);
  FSDPP_ENFORCE(buffer, UsageError, "unit '{}' does not manage this tensor", name_);
  return state_ == UnitState::Shown ? buffer->params()[i].shard_view : parameter;
}

UnitMemory Unit::memory(bool as_root) const {
  UnitMemory m;
  m.keeps_gathered = options_.reshard_after_forward ? group_after_forward() == 1 : as_root || root_default_;
  m.keeps_gathered = m.keeps_gathered || modules_.size() > 1;  // while other units run between its modules
  m.gradient_slots = context_->reduce_buffers();
  m.gathers_ahead = context_->gathers_apart();
  m.reserves_slots = context_->symmetric_buffers();
  m.holds_gradient = reduces_unused_;
  m.steps_in_backward = steps_in_backward();
  m.reduces_on_wire = context_->reduces_on_wire() || writes_host_memory();
  for (auto& b : buffers_) {
    int64_t shard = b->shard_bytes();
    (reads_host_memory() ? m.host_bytes : m.shard_bytes) += shard;
    m.cast_shard_bytes += b->cast_bytes();
    m.gathered_bytes += context_->gathered_pool().rounded(b->gathered_bytes());
    m.staging_bytes += b->staging_bytes();
    bool trains = c10::isFloatingType(b->config().dtype) &&
                  std::any_of(b->params().begin(), b->params().end(), [](auto& p) { auto h = p.handle(); return h.defined() && h.requires_grad(); });
    if (!trains) continue;
    m.gradient_bytes += context_->gradient_pool().rounded(b->gradient_bytes());
    (writes_host_memory() ? m.host_bytes : m.sharded_gradient_bytes) += b->sharded_gradient_bytes(keeps_reduce_dtype());
    if (writes_host_memory()) m.gradient_staging_bytes += shard;
  }
  return m;
}

std::vector<shard::ShardedParam> Unit::sharded_params() const {
  std::vector<shard::ShardedParam> result;
  for (size_t k = 0; k < buffers_.size(); ++k) {
    auto& b = *buffers_[k];
    for (size_t i = 0; i < b.params().size(); ++i) {
      auto& p = b.params()[i];
      auto& placement = b.plan().params[i];
      shard::ShardedParam s;
      s.name = p.name;
      s.global_sizes = p.sizes;
      s.handle = p.handle();
      s.dtype = s.handle.defined() && state_ != UnitState::Shown ? s.handle.scalar_type() : b.config().dtype;
      s.mesh = context_->mesh_ptr();
      s.cut = placement.cut;
      s.row_numel = placement.row_numel;
      for (int r = 0; r < b.config().world_size; ++r) s.ranges.push_back(b.plan().local_range(i, r));
      s.slice_offset = p.shard_view.storage_offset();
      s.buffer = k;
      result.push_back(std::move(s));
    }
  }
  return result;
}

std::string Unit::plan(bool rows_by_rank) const {
  std::string text;
  for (auto& b : buffers_) {
    std::vector<std::string> names;
    for (auto& p : b->params()) names.push_back(p.name);
    text += fmt::format("unit '{}' buffer of {} gathered as {} reduced in {}\n", name_, c10::toString(b->config().dtype),
                        c10::toString(b->config().gathered_dtype), c10::toString(b->config().reduce_dtype));
    text += shard::to_string(b->plan(), names, rows_by_rank);
  }
  return text;
}

}  // namespace fsdpp::engine

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/enforce.h"
#include "engine/unit.h"
#include "engine/use_guard.h"

namespace fsdpp::engine {
namespace {

// The handles still show the shard on meta: a conversion in between would be lost.
void check_kept(FlatBuffer& buffer) {
  for (auto& p : buffer.params()) {
    auto handle = p.handle();
    const bool kept = !handle.defined() || handle.storage().unsafeGetStorageImpl() == buffer.shard_storage();
    FSDPP_ENFORCE(kept, UsageError, "materialize: parameter '{}' was replaced or converted (it is {} on {} now) between fully_shard and "
                  "materialize. Try: convert the module before fully_shard, or after materialize.", p.name,
                  c10::toString(handle.scalar_type()), handle.device().str());
  }
}

}  // namespace

bool Unit::deferred() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](auto& b) { return b->deferred(); });
}

void Unit::check_materialized() const {
  if (!deferred()) return;
  std::vector<std::string> names;
  for (auto& b : buffers_)
    if (b->deferred())
      for (auto& p : b->params()) names.push_back(p.name);
  fail<UsageError>("parameters should be materialized from meta device before training, but these of unit '{}' are still on meta: [{}]. "
                   "Try: fsdpp::materialize(*model) after the last fully_shard.", name_, fmt::join(names, ", "));
}

void Unit::materialize(const Filler& fill) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<FlatBuffer*, at::Tensor>> shards;
  for (auto& b : buffers_) {
    if (!b->deferred()) continue;
    check_kept(*b);
    auto shard = b->make_shard();
    for (size_t i = 0; i < b->params().size(); ++i) {
      auto& p = b->params()[i];
      fill(p, b->plan().local_range(i, b->config().rank), b->local_view(shard, p));
    }
    shards.emplace_back(b.get(), std::move(shard));
  }
  for (auto& [buffer, shard] : shards) {
    unguard_storage(buffer->shard_storage());
    unguard_storage(buffer->gathered_storage());
    buffer->take_shard(std::move(shard));
  }
  note_buffers();
}

}  // namespace fsdpp::engine

#include "fsdpp/profiler/known_memory.h"

#include <unordered_set>

namespace fsdpp::profiler {

std::vector<MemoryEvent> memory_of(MemoryEvent::Category category, const std::vector<at::Tensor>& tensors) {
  std::vector<MemoryEvent> out;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const c10::Storage& storage = tensor.storage();
    if (storage.nbytes() == 0 || storage.data() == nullptr || !seen.insert(storage.data()).second) continue;
    MemoryEvent event;
    event.bytes = static_cast<int64_t>(storage.nbytes());
    event.address = reinterpret_cast<uint64_t>(storage.data());
    event.device = tensor.is_cuda() ? tensor.get_device() : -1;
    event.category = category;
    out.push_back(event);
  }
  return out;
}

}  // namespace fsdpp::profiler

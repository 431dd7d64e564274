#include "fsdpp/trace/scope.h"

namespace fsdpp::trace {
namespace {
std::atomic<Listener*> process_listener{nullptr};
thread_local Listener* thread_listener = nullptr;
}  // namespace

void set_listener(Listener* l, bool for_this_thread) noexcept {
  if (for_this_thread)
    thread_listener = l;
  else
    process_listener.store(l, std::memory_order_release);
}

Listener* listener() noexcept {
  return thread_listener ? thread_listener : process_listener.load(std::memory_order_acquire);
}
}  // namespace fsdpp::trace

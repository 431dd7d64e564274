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

const char* name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::Unshard: return "Unshard";
    case Kind::Reshard: return "Reshard";
    case Kind::Reduce: return "Reduce";
    case Kind::PreForward: return "PreForward";
    case Kind::PostForward: return "PostForward";
    case Kind::PreBackward: return "PreBackward";
    case Kind::PostBackward: return "PostBackward";
    case Kind::Forward: return "Forward";
    case Kind::Backward: return "Backward";
    case Kind::Optimizer: return "Optimizer";
    case Kind::Loader: return "Loader";
    case Kind::User: return "User";
  }
  return "User";
}
}  // namespace fsdpp::trace

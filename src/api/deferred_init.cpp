#include "fsdpp/api/deferred_init.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdpp {
namespace {

// Included on this thread, the key sends every operator by the engine's use guard.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

bool set_active(bool value) {
  const bool before = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, value);
  return before;
}

}  // namespace

DeferredInit::DeferredInit() : outer_(set_active(true)) {}
DeferredInit::~DeferredInit() { set_active(outer_); }
bool DeferredInit::active() noexcept { return c10::impl::tls_is_dispatch_key_included(kKey); }

DeferredInit::Pause::Pause() : active_(set_active(false)) {}
DeferredInit::Pause::~Pause() { set_active(active_); }

}  // namespace fsdpp

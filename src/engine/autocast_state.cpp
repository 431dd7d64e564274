#include "engine/autocast_state.h"

#include <ATen/autocast_mode.h>

namespace fsdpp::engine {
namespace {

constexpr std::array kDevices{c10::kCPU, c10::kCUDA};

}  // namespace

AutocastState AutocastState::now() {
  AutocastState state;
  for (size_t i = 0; i < kDevices.size(); ++i)
    state.devices_[i] = {at::autocast::is_autocast_enabled(kDevices[i]), at::autocast::get_autocast_dtype(kDevices[i])};
  state.caches_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < kDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kDevices[i], devices_[i].enabled);
    at::autocast::set_autocast_dtype(kDevices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_);
}

AutocastGuard::AutocastGuard(const AutocastState& state) : before_(AutocastState::now()) {
  at::autocast::increment_nesting();
  state.restore();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  before_.restore();
}

}  // namespace fsdpp::engine

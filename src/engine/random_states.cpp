#include "engine/random_states.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>

namespace fsdpp::engine {
namespace {

// The current device, if work was done on it already: asking an unused one for its generator would set it up.
std::optional<c10::Device> current_cuda_device() {
  if (!at::globalContext().hasCUDA()) return std::nullopt;
  auto device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  return at::detail::getCUDAHooks().hasPrimaryContext(device.index()) ? std::optional(device) : std::nullopt;
}

}  // namespace

RandomStates::RandomStates(std::vector<at::Generator> generators) : generators_(std::move(generators)) {
  for (auto& g : generators_) {
    std::lock_guard lock(g.mutex());
    states_.push_back(g.get_state());
  }
}

RandomStates RandomStates::of_defaults(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices{c10::kCPU};
  auto add = [&](c10::Device d) {
    if (d.is_cuda() && std::find(devices.begin(), devices.end(), d) == devices.end()) devices.push_back(d);
  };
  for (auto& t : tensors)
    if (t.defined()) add(t.device());
  if (auto device = current_cuda_device()) add(*device);
  std::vector<at::Generator> generators;
  for (auto& d : devices) generators.push_back(at::globalContext().defaultGenerator(d));
  return RandomStates(std::move(generators));
}

void RandomStates::restore() const {
  for (size_t i = 0; i < generators_.size(); ++i) {
    auto generator = generators_[i];
    std::lock_guard lock(generator.mutex());
    generator.set_state(states_[i]);
  }
}

}  // namespace fsdpp::engine

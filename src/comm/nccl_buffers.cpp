// Memory that is registered with NCCL as symmetric windows.
#include "comm/nccl_buffers.h"

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <thread>

#include "base/enforce.h"
#include "comm/end_process.h"
#include "comm/nccl_api.h"
#include "cuda/check.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

int attribute(cudaDeviceAttr which, c10::Device device) {
  int value = 0;
  FSDPP_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device.index()));
  return value;
}

bool reachable(int64_t gpu, c10::Device device) {
  const auto bus_id = fmt::format("{:04x}:{:02x}:{:02x}.0", gpu >> 16, gpu >> 8 & 0xff, gpu & 0xff);
  int other = 0, can = 0;
  cudaError_t status = cudaDeviceGetByPCIBusId(&other, bus_id.c_str());
  if (status == cudaSuccess) status = cudaDeviceCanAccessPeer(&can, device.index(), other);
  cuda::ignore(status);
  return status == cudaSuccess && can != 0;
}

struct WindowMemory {
  void* data;
  std::shared_ptr<NcclCore> core;
};

void free_window_memory(void* context) {
  const std::unique_ptr<WindowMemory> memory(static_cast<WindowMemory*>(context));
  if (memory->core->drop_window(memory->data)) (void)ncclMemFree(memory->data);
}

}  // namespace

WindowFacts own_window_facts(c10::Device device) {
  WindowFacts facts;
  facts.host = window_host();
  facts.gpu = int64_t{attribute(cudaDevAttrPciDomainId, device)} << 16 | int64_t{attribute(cudaDevAttrPciBusId, device)} << 8 |
              attribute(cudaDevAttrPciDeviceId, device);
  facts.bar = window_bar_of_environment();
  int driver = 0;
  FSDPP_CUDA_CHECK(cudaDriverGetVersion(&driver));
  if (facts.bar == WindowBar::None && driver < 12000) facts.bar = WindowBar::OldDriver;
  return facts;
}

int64_t first_unreachable(std::span<const WindowFacts> facts, int rank, c10::Device device) {
  const auto& own = facts[static_cast<size_t>(rank)];
  for (size_t i = 0; i < facts.size(); ++i)
    if (facts[i].host == own.host && facts[i].gpu != own.gpu && !reachable(facts[i].gpu, device)) return static_cast<int64_t>(i);
  return -1;
}

Allocation window_memory(int64_t bytes, c10::Device device, std::shared_ptr<NcclCore> core) {
  const int64_t rounded = (bytes + kRegisteredGranule - 1) / kRegisteredGranule * kRegisteredGranule;
  c10::cuda::CUDAGuard guard(device);
  auto context = std::make_unique<WindowMemory>(WindowMemory{nullptr, std::move(core)});
  if (ncclMemAlloc(&context->data, static_cast<size_t>(rounded)) != ncclSuccess) {
    cuda::ignore(cudaGetLastError());
    return {};
  }
  void* data = context->data;
  return {c10::DataPtr(data, context.release(), &free_window_memory, device), rounded, true};
}

void NcclCore::register_window(void* memory, size_t bytes) {
  ncclWindow_t window = nullptr;
  const ncclResult_t result = ncclCommWindowRegister(enter(), memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  --calls_;
  check("ncclCommWindowRegister", result);
  if (window == nullptr) fail_comm(CommErrc::Backend, "communicator '{}': ncclCommWindowRegister gave no window", name_);
  std::lock_guard lock(windows_mutex_);
  windows_.push_back({memory, bytes, window, ++registered_});
}

// Called by whoever frees the memory, in a destructor as a rule. No lock is held around NCCL's call: the watchdog asks for windows too.
bool NcclCore::drop_window(void* memory) noexcept {
  const auto is_it = [memory](const Window& one) { return one.memory == memory; };
  ncclWindow_t window = nullptr;
  {
    std::lock_guard lock(windows_mutex_);
    const auto it = std::find_if(windows_.begin(), windows_.end(), is_it);
    if (it == windows_.end()) return true;
    window = it->window;
  }
  ncclComm_t handle = nullptr;
  try {
    handle = enter();
  } catch (...) {  // the communicator has failed
    return false;
  }
  if (handle != nullptr) (void)ncclCommWindowDeregister(handle, window);
  --calls_;
  if (handle == nullptr) return false;  // it is being destroyed, and takes too long
  std::lock_guard lock(windows_mutex_);
  std::erase_if(windows_, is_it);
  return true;
}

int64_t NcclCore::registrations() const noexcept {
  std::lock_guard lock(windows_mutex_);
  uint64_t hash = registered_;
  for (const auto& one : windows_) hash = hash * 1099511628211U + one.id;
  return static_cast<int64_t>(hash);
}

void NcclCore::drop_windows(ncclComm_t handle) noexcept {
  std::vector<Window> all;
  {
    std::lock_guard lock(windows_mutex_);
    all = windows_;
  }
  for (const auto& one : all) (void)ncclCommWindowDeregister(handle, one.window);
  std::lock_guard lock(windows_mutex_);
  windows_.clear();
}

bool NcclCore::has_windows() const noexcept {
  std::lock_guard lock(windows_mutex_);
  return !windows_.empty();
}

bool NcclCore::in_window(const void* data) const noexcept {
  std::lock_guard lock(windows_mutex_);
  return std::any_of(windows_.begin(), windows_.end(), [data](const Window& one) {
    const auto* first = static_cast<const std::byte*>(one.memory);
    return data >= first && data < first + one.bytes;
  });
}

// After an abort: whether the operations that had started are over.
bool NcclCore::comes_to_rest() noexcept {
  constexpr auto kRestLimit = std::chrono::seconds(2);
  auto running = [this] {
    std::lock_guard lock(mutex_);
    return std::any_of(pending_.begin(), pending_.end(),
                       [](const auto& record) { return record->issued && record->start.query() && !record->end.query(); });
  };
  try {
    for (const auto end = Clock::now() + kRestLimit; running(); std::this_thread::sleep_for(std::chrono::milliseconds(10)))
      if (Clock::now() > end) return false;
  } catch (...) {  // the device failed: nothing runs on it
  }
  return true;
}

void NcclCore::end_if_stuck(bool aborted) noexcept {
  if (!has_windows() || (aborted && comes_to_rest())) return;
  try {
    end_process(fmt::format("{}. Communicator '{}': operations on symmetric buffers did not end by ncclCommAbort; this process ends now",
                            failure_->text(), name_));
  } catch (...) {  // no memory for the text
    end_process(failure_->text());
  }
}

}  // namespace fsdpp::comm

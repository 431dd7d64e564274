#include "comm/nccl_core.h"

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <thread>

#include "base/enforce.h"
#include "comm/nccl_api.h"
#include "cuda/check.h"
#include "fsdpp/base/log.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kAbortLimit = std::chrono::seconds(10);
constexpr auto kCallGrace = std::chrono::seconds(2);

struct InitResult {
  std::mutex mutex;
  ncclComm_t handle = nullptr;
  ncclResult_t result = ncclInProgress;
  std::string text;
  bool abandoned = false;
};

// Blocking calls on a thread of our own: NCCL's non-blocking mode would start a thread for every collective.
void init_thread(std::shared_ptr<InitResult> out, c10::DeviceIndex device, int size, ncclUniqueId id, int rank,
                 const CommunicatorOptions& options) {
  cudaSetDevice(device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (options.copy_engine) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  ncclComm_t handle = nullptr;
  const ncclResult_t result = ncclCommInitRankConfig(&handle, size, id, rank, &config);
  std::lock_guard lock(out->mutex);
  out->handle = handle;
  out->result = result;
  if (result != ncclSuccess) out->text = nccl_text("ncclCommInitRankConfig", result);
  if (out->abandoned && handle != nullptr) ncclCommAbort(handle);
}

}  // namespace

NcclCore::NcclCore(const CommInfo& info, const Bootstrap& boot, std::shared_ptr<Failure> failure)
    : name_(info.name),
      key_(boot.key),
      ranks_(info.ranks),
      rank_(info.rank),
      device_(info.device.index()),
      watched_(boot.watchdog != nullptr),
      options_(info.options),
      failure_(std::move(failure)) {
  check_nccl_version();
  connect(boot);
}

ncclUniqueId NcclCore::exchange_id(const Bootstrap& boot) {
  const auto base = fmt::format("comm/{}/", key_);
  boot.store->set(fmt::format("{}here/{}", base, rank_), "1");
  ncclUniqueId id;
  if (rank_ == 0) {
    check("ncclGetUniqueId", ncclGetUniqueId(&id));
    boot.store->set(base + "nccl_id", std::string(id.internal, sizeof id.internal));
    return id;
  }
  std::string bytes;
  try {
    bytes = boot.store->get(base + "nccl_id", boot.timeout);
  } catch (const CommError& error) {
    if (error.code() == CommErrc::Timeout) late(boot);
    throw;
  }
  FSDPP_ENFORCE(bytes.size() == sizeof id.internal, UsageError,
                "communicator '{}': expected an NCCL id of {} bytes, got {}", name_, sizeof id.internal, bytes.size());
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

void NcclCore::connect(const Bootstrap& boot) {
  const ncclUniqueId id = exchange_id(boot);
  auto result = std::make_shared<InitResult>();
  const int size = static_cast<int>(ranks_.size());
  const bool in_time =
      run_bounded([=, device = device_, rank = rank_, options = options_] { init_thread(result, device, size, id, rank, options); }, boot.timeout);
  std::lock_guard lock(result->mutex);
  if (!in_time && result->result == ncclInProgress) {
    result->abandoned = true;
    late(boot);
  }
  if (result->result != ncclSuccess)
    fail_comm(CommErrc::Backend, "communicator '{}': {}. Try: NCCL_DEBUG=WARN", name_, result->text);
  handle_ = result->handle;
}

void NcclCore::late(const Bootstrap& boot) {
  std::string absent;
  for (size_t r = 0; r < ranks_.size(); ++r)
    if (!boot.store->try_get(fmt::format("comm/{}/here/{}", key_, r)))
      absent += fmt::format("{}{}", absent.empty() ? "" : ", ", ranks_[r]);
  fail_comm(CommErrc::InitTimeout, "communicator '{}': NCCL did not connect its {} ranks within {} s; {}", name_,
            ranks_.size(), static_cast<double>(boot.timeout.count()) / 1e3,
            absent.empty()
                ? "all of them tried. Try: NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME for the right network interface"
                : fmt::format("never created by rank {}. Try: every member must create it", absent));
}

void NcclCore::check(const char* call, ncclResult_t result) {
  if (result == ncclSuccess) [[likely]]
    return;
  failure_->set(result == ncclRemoteError ? CommErrc::RemoteDied : CommErrc::Backend,
                fmt::format("communicator '{}': {}. Try: NCCL_DEBUG=WARN", name_, nccl_text(call, result)));
  failure_->check();
}

std::shared_ptr<NcclRecord> NcclCore::begin(Op op, cuda::StreamView stream) {
  failure_->check();
  auto record = pool_->take();
  record->failure = failure_;
  record->op = std::move(op);
  record->called = Clock::now();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FSDPP_CUDA_CHECK(cudaStreamIsCapturing(stream.handle(), &status));
  record->captured = status != cudaStreamCaptureStatusNone;
  if (!watched_ || record->captured) return record;
  record->start.record(stream);
  std::lock_guard lock(mutex_);
  pending_.push_back(record);
  issued_ = record->op.sequence + 1;
  last_ = record->op;
  return record;
}

ncclComm_t NcclCore::enter() {
  std::lock_guard lock(handle_mutex_);
  failure_->check();
  ++calls_;
  return handle_;
}

void NcclCore::call(const Op& op, cuda::StreamView stream) {
  const ncclResult_t result = nccl_issue(op, enter(), static_cast<int>(ranks_.size()), stream.handle());
  --calls_;
  check(name_of(op.sig.kind).data(), result);
}

void NcclCore::group_start() { check("ncclGroupStart", ncclGroupStart()); }

void NcclCore::group_end() {
  ++calls_;
  const ncclResult_t result = ncclGroupEnd();
  --calls_;
  check("ncclGroupEnd", result);
}

void NcclCore::finish(NcclRecord& record, cuda::StreamView stream) {
  record.end.record(stream);
  record.issued.store(true, std::memory_order_release);
}

bool NcclCore::busy() {
  std::lock_guard lock(mutex_);
  return !pending_.empty() && !(pending_.back()->issued && pending_.back()->end.query());
}

void NcclCore::close(bool now) noexcept {
  if (now) failure_->set(CommErrc::Aborted, "the communicator was destroyed while an exception was on its way");
  try {
    while (!failure_->failed() && busy()) std::this_thread::sleep_for(std::chrono::microseconds(200));
  } catch (...) {  // a sick device, or the runtime is unloading
    failure_->set(CommErrc::Backend, "the CUDA device failed");
  }
  if (failure_->failed()) return abort_handle();
  ncclComm_t handle = nullptr;
  {
    std::lock_guard lock(handle_mutex_);
    handle = std::exchange(handle_, nullptr);
  }
  if (handle == nullptr) return;
  const bool ended = run_bounded(
      [handle, core = shared_from_this()] {
        cudaSetDevice(core->device_);
        core->drop_windows(handle);
        ncclCommDestroy(handle);
      },
      kAbortLimit);
  if (!ended)
    log::warn(fmt::format("communicator '{}': ncclCommDestroy did not end within {} s", name_, kAbortLimit.count()));
}

void NcclCore::abort_handle() noexcept {
  ncclComm_t handle = nullptr;
  {
    std::lock_guard lock(handle_mutex_);
    handle = std::exchange(handle_, nullptr);
  }
  if (handle == nullptr) return;
  // A call that is about to return must not lose the handle under its feet; one that hangs needs the abort to return.
  for (const auto end = Clock::now() + kCallGrace; calls_ > 0 && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const bool ended = run_bounded(
      [handle, device = device_] {
        cudaSetDevice(device);
        ncclCommAbort(handle);
      },
      kAbortLimit);
  end_if_stuck(ended);
  if (!ended)
    log::error(fmt::format(
        "communicator '{}': ncclCommAbort did not end within {} s; this process may hang until its launcher ends it",
        name_, kAbortLimit.count()));
}

void NcclCore::fail(CommErrc code, const std::string& text) noexcept {
  failure_->set(code, text);
  abort_handle();
}

}  // namespace fsdpp::comm

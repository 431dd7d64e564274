#include "comm/nccl_communicator.h"

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "base/enforce.h"
#include "comm/nccl_core.h"
#include "cuda/check.h"

namespace fsdpp::comm {
namespace {

/// A few bytes of device memory of our own.
class DeviceWord {
 public:
  explicit DeviceWord(c10::Device device) {
    c10::cuda::CUDAGuard guard(device);
    FSDPP_CUDA_CHECK(cudaMalloc(&data_, sizeof(float)));
    FSDPP_CUDA_CHECK(cudaMemset(data_, 0, sizeof(float)));
    FSDPP_CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~DeviceWord() { cuda::ignore(cudaFree(data_)); }
  DeviceWord(const DeviceWord&) = delete;
  DeviceWord& operator=(const DeviceWord&) = delete;
  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  void* data_ = nullptr;
};

class NcclCommunicator final : public FrontCommunicator {
 public:
  NcclCommunicator(CommInfo comm_info, const Bootstrap& boot)
      : FrontCommunicator(std::move(comm_info)), stream_(info().device), word_(info().device) {
    if (size() == 1) return;
    core_ = std::make_shared<NcclCore>(info(), boot, shared_failure());
    if (boot.watchdog != nullptr) boot.watchdog->watch(core_);
    barrier({.label = "connect", .timeout = boot.timeout});
  }
  ~NcclCommunicator() override {
    if (core_) core_->close(std::uncaught_exceptions() > 0);
  }

 protected:
  Ticket issue(Op op, cuda::StreamView stream) override {
    if (grouping_) {
      join_group(op, stream);
      core_->call(op, stream);
      return {};
    }
    auto record = core_->begin(op, stream);
    core_->call(op, stream);
    core_->finish(*record, stream);
    return Ticket(std::move(record));
  }

  void issue_barrier(Op op) override {
    op.sig.dtype = c10::ScalarType::Float;
    op.sig.count = 1;
    op.in = op.out = word_.data();
    issue(std::move(op), stream_).wait_host();
  }

  void fail(CommErrc code, const std::string& text) noexcept override {
    FrontCommunicator::fail(code, text);
    if (core_) core_->fail(code, text);
  }

  void open_group() override {
    if (size() == 1) return;
    core_->group_start();
    grouping_ = true;
  }

  Ticket close_group(Ticket last) override {
    if (size() == 1) return last;
    grouping_ = false;
    auto parts = std::exchange(group_, {});
    core_->group_end();
    std::vector<std::shared_ptr<NcclRecord>> records;
    for (auto& [stream, record] : parts) {
      core_->finish(*record, stream);
      records.push_back(std::move(record));
    }
    if (records.empty()) return {};
    if (records.size() == 1) return Ticket(std::move(records.front()));
    return Ticket(std::make_shared<NcclGroupTicket>(std::move(records)));
  }

  Ticket copy(const Op& op, cuda::StreamView stream) override {
    if (op.out == op.in || op.sig.count == 0) return {};
    FSDPP_CUDA_CHECK(cudaMemcpyAsync(op.out, op.in, op.in_bytes(), cudaMemcpyDeviceToDevice, stream.handle()));
    auto record = copies_->take();
    record->op = op;
    record->failure = shared_failure();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    FSDPP_CUDA_CHECK(cudaStreamIsCapturing(stream.handle(), &status));
    record->captured = status != cudaStreamCaptureStatusNone;
    record->end.record(stream);
    return Ticket(std::move(record));
  }

  void check_dtype(const Signature& sig) const override {
    FrontCommunicator::check_dtype(sig);
    FSDPP_ENFORCE(sig.dtype != c10::ScalarType::Short, UsageError,
                  "{} on communicator '{}': NCCL has no 16-bit whole numbers. Try: Int", name_of(sig.kind), name());
  }

 private:
  // One record for each stream of the group; the launch is at its end.
  void join_group(const Op& op, cuda::StreamView stream) {
    const auto it = std::find_if(group_.begin(), group_.end(), [&](const auto& part) { return part.first == stream; });
    if (it == group_.end())
      group_.emplace_back(stream, core_->begin(op, stream));
    else
      ++it->second->group;
  }

  cuda::Stream stream_;  // for barriers
  DeviceWord word_;
  std::shared_ptr<NcclCore> core_;
  std::shared_ptr<NcclRecordPool> copies_ = std::make_shared<NcclRecordPool>();
  bool grouping_ = false;
  std::vector<std::pair<cuda::StreamView, std::shared_ptr<NcclRecord>>> group_;
};

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(CommInfo info, const Bootstrap& bootstrap) {
  return std::make_shared<NcclCommunicator>(std::move(info), bootstrap);
}

}  // namespace fsdpp::comm

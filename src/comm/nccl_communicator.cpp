#include "comm/nccl_communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "base/enforce.h"
#include "comm/nccl_buffers.h"
#include "comm/nccl_core.h"
#include "cuda/check.h"
#include "cuda/device_bytes.h"

namespace fsdpp::comm {
namespace {

constexpr size_t kGatherGranule = 16;

class NcclCommunicator final : public FrontCommunicator {
 public:
  NcclCommunicator(CommInfo comm_info, const Bootstrap& boot)
      : FrontCommunicator(std::move(comm_info)), stream_(info().device), scratch_(info().device, kNumbers * sizeof(int64_t) * info().ranks.size()) {
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
    check_gather(op, stream);
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

  // What NCCL 2.28 does wrong in registered memory (seen on two H200).
  void check_gather(const Op& op, cuda::StreamView stream) const {
    if (op.sig.kind != OpKind::AllGather || !core_ || !core_->in_window(op.out)) return;
    const auto who = [&] { return fmt::format("all_gather '{}' on communicator '{}'", op.label, name()); };
    FSDPP_ENFORCE(op.in_bytes() % kGatherGranule == 0, UsageError,
                  "{}: expected a multiple of {} bytes of each rank in registered memory, got {}: NCCL gathers others wrongly. Try: pad "
                  "the parts, or memory that is not from allocate()",
                  who(), kGatherGranule, op.in_bytes());
    FSDPP_ENFORCE(!info().options.copy_engine || !stream.is_capturing(), UsageError,
                  "{}: a gather by copy engines can't be captured in a CUDA graph by NCCL. Try: symmetric buffers without "
                  "copy_engine_gathers (CommunicatorOptions::copy_engine)",
                  who());
  }

  void issue_barrier(Op op) override {
    op.sig.dtype = c10::ScalarType::Float;
    op.sig.count = 1;
    op.in = op.out = scratch_.data();
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

  void prepare_buffers(const OpInfo& info) override {
    if (!has_windows_) has_windows_ = this->info().assume_windows || agree_on_windows(info);
  }

  Allocation reserve(int64_t bytes) override {
    return *has_windows_ ? window_memory(bytes, device(), core_) : plain_memory(bytes);
  }
  [[nodiscard]] int64_t registrations() const noexcept override { return core_->registrations(); }
  void enlist(Allocation& memory) override {
    if (memory.registered) core_->register_window(memory.data.get(), static_cast<size_t>(memory.bytes));
  }

  void gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo& info) override {
    FSDPP_ENFORCE(mine.size() <= kNumbers, UsageError, "expected at most {} numbers, got {}", kNumbers, mine.size());
    auto* parts = static_cast<int64_t*>(scratch_.data());
    int64_t* own = parts + static_cast<size_t>(rank()) * mine.size();
    const auto handle = stream_.view().handle();
    FSDPP_CUDA_CHECK(cudaMemcpyAsync(own, mine.data(), mine.size_bytes(), cudaMemcpyHostToDevice, handle));
    const Signature sig{.kind = OpKind::AllGather, .dtype = c10::ScalarType::Long, .count = std::ssize(mine)};
    issue(make_op(sig, parts, own, info), stream_).wait_host();
    FSDPP_CUDA_CHECK(cudaMemcpyAsync(all.data(), parts, all.size_bytes(), cudaMemcpyDeviceToHost, handle));
    stream_.view().synchronize();
  }

 private:
  // Whether all ranks can register memory: each says what it is, then whom it can't reach.
  bool agree_on_windows(const OpInfo& info) {
    static_assert(sizeof(WindowFacts) == kNumbers * sizeof(int64_t));
    std::vector<WindowFacts> facts(static_cast<size_t>(size()));
    const auto exchange = [&](const WindowFacts& mine) {
      gather_numbers({&facts.front().host, facts.size() * kNumbers}, {&mine.host, kNumbers}, info);
    };
    auto mine = own_window_facts(device());
    exchange(mine);
    mine.unreachable = first_unreachable(facts, rank(), device());
    exchange(mine);
    const auto refusal = windows_refused(facts, this->info().ranks);
    if (refusal && rank() == 0) warn_plain_buffers(name(), *refusal);
    return !refusal;
  }

  // One record for each stream of the group; the launch is at its end.
  void join_group(const Op& op, cuda::StreamView stream) {
    const auto it = std::find_if(group_.begin(), group_.end(), [&](const auto& part) { return part.first == stream; });
    if (it == group_.end())
      group_.emplace_back(stream, core_->begin(op, stream));
    else
      ++it->second->group;
  }

  static constexpr size_t kNumbers = 4;  // of each rank in an exchange
  cuda::Stream stream_;                  // for barriers and exchanges
  cuda::DeviceBytes scratch_;
  std::optional<bool> has_windows_;  // known from the first allocate() on
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

#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "fsdpp/base/error.h"
#include "fsdpp/base/export.h"
#include "fsdpp/cuda/stream.h"

namespace fsdpp::comm {

enum class ReduceOp { Sum, Max, Min };

/// `count` elements of `dtype` at `data`, contiguous, on the communicator's device. Owns nothing.
struct Buffer {
  void* data = nullptr;
  int64_t count = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
};
struct ConstBuffer {
  const void* data = nullptr;
  int64_t count = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  ConstBuffer() = default;
  ConstBuffer(const void* d, int64_t n, c10::ScalarType t) : data(d), count(n), dtype(t) {}
  ConstBuffer(const Buffer& b) : data(b.data), count(b.count), dtype(b.dtype) {}  // NOLINT: a buffer is readable
};

/// What the caller knows about one operation; shown in errors and traces.
struct OpInfo {
  std::string_view label;                ///< e.g. "layers.7 forward"; copied when needed
  std::chrono::milliseconds timeout{0};  ///< 0: the communicator's default
};

/// Memory for operands of one communicator, from Communicator::allocate. `data` frees it.
struct Allocation {
  c10::DataPtr data;
  int64_t bytes = 0;        ///< taken from the device: those asked for, rounded up to kRegisteredGranule where registered
  bool registered = false;  ///< a symmetric window of NCCL; equal on all ranks
};
inline constexpr int64_t kRegisteredGranule = int64_t{1} << 21;  ///< what the driver maps at once

/// Completion of an operation (or of a group). Cheap to copy; an empty ticket is complete.
class FSDPP_API Ticket {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool query() const = 0;
    virtual void wait(cuda::StreamView stream) const = 0;
    virtual void wait_host() const = 0;
  };
  Ticket() = default;
  explicit Ticket(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  /// True when complete. Never blocks; throws the operation's error if it failed.
  [[nodiscard]] bool query() const { return !state_ || state_->query(); }
  /// CUDA: `stream` waits, the host does not. CPU back ends: blocks the host until complete. Throws CommError on
  /// failure.
  void wait(cuda::StreamView stream) const {
    if (state_) state_->wait(stream);
  }
  /// Blocks the host until complete. Throws CommError on failure.
  void wait_host() const {
    if (state_) state_->wait_host();
  }

 private:
  std::shared_ptr<const State> state_;
};

/// Collectives among a fixed list of ranks.
///
/// Collective contract: every rank of the communicator calls the same operations with the same counts, dtypes and ops
/// in
///   the same order. A mismatch is reported as CommError{Mismatch} naming both sides at once where the back end can see
///   it (host, in-process; labels that differ count too, an empty label agrees with every other). NCCL cannot: it
///   hangs, and the time-out names both sides, or, where the sizes happen to fit, goes on with wrong data.
/// Streams: the caller passes the stream on every call; the communicator has none of its own. CUDA: the operation is
/// queued
///   on that stream and the host returns at once. CPU: it runs on a worker thread in issue order; input is read and
///   output written until the ticket completes.
/// Lifetime: buffers must live until the ticket is complete (on the stream, for CUDA).
/// Numbers: Sum in the input dtype on NCCL; fp32 accumulation in fixed rank order 0,1,… for 16-bit types on the CPU
/// back
///   ends, so their results are the same bits on every rank and run. The mean is the caller's business.
/// Dtypes: Float, Double, Half, BFloat16, Byte, Char, Short (not NCCL), Int, Long, Bool (all_gather, broadcast,
/// all_to_all only; moved as bytes). Threads: one issuing thread; abort() may come from any thread. Destruction waits
/// for pending operations; during stack unwinding it aborts them. After the first failure every call throws that
/// failure again.
class FSDPP_API Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  [[nodiscard]] virtual c10::Device device() const noexcept = 0;

  /// `out` holds size()·in.count elements, rank r's at [r·in.count, …). In place: in.data == out.data + rank·in.count.
  virtual Ticket all_gather(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info = {}) = 0;
  /// `in` holds size()·out.count elements; rank r receives the reduction of every rank's [r·out.count, …).
  /// In place: out.data == in.data + rank·out.count.
  virtual Ticket reduce_scatter(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream,
                                const OpInfo& info = {}) = 0;
  /// In place when out.data == in.data.
  virtual Ticket all_reduce(Buffer out, ConstBuffer in, ReduceOp op, cuda::StreamView stream,
                            const OpInfo& info = {}) = 0;
  virtual Ticket broadcast(Buffer inout, int root, cuda::StreamView stream, const OpInfo& info = {}) = 0;
  /// Equal parts: part r of `in` goes to rank r; part r of `out` comes from rank r. Out of place only.
  virtual Ticket all_to_all(Buffer out, ConstBuffer in, cuda::StreamView stream, const OpInfo& info = {}) = 0;
  /// Operations between group_begin() and group_end() are issued as one (one launch on NCCL); the tickets returned
  /// inside are empty, group_end()'s ticket stands for all. Use the Group guard.
  virtual void group_begin() = 0;
  virtual Ticket group_end() = 0;
  /// Blocks the host until all ranks are here.
  virtual void barrier(const OpInfo& info = {}) = 0;
  /// `bytes` bytes (1 or more), not zeroed, for operands of this communicator: on NCCL memory that the other GPUs can reach,
  /// registered as a symmetric window, so that collectives whose operands lie in such memory (in place: the larger one suffices)
  /// run by kernels that need fewer thread blocks and sum in fp32, or by copy engines (CommunicatorOptions). Where that can't be
  /// (ranks on several hosts, GPUs without peer access, NCCL_WIN_ENABLE=0, NCCL_CUMEM_ENABLE=0, not NCCL) it is plain memory, and
  /// one warning says why.
  /// A gather in registered memory takes multiples of 16 bytes of each rank (else UsageError: NCCL 2.28 gets others wrong).
  /// Collective, blocks the host until all ranks are here; not inside a group or a stream capture. CommError{Mismatch} on every rank,
  /// naming ranks and sizes, when they ask for different ones; CommError{Backend} on every rank when one has no memory left.
  /// Lifetime: the memory may outlive the communicator (the registration ends with it). Free it when no operation uses it, and in
  /// the same order on all ranks: the next allocate() compares, CommError{Mismatch}. Aligned to 4096 bytes (CPU: 64).
  /// Failures: waits of NCCL 2.28's symmetric kernels and copy engines do not look at its abort flag. A communicator that fails
  /// while it has registered memory and can't be aborted within 10 s ends its process, after the report.
  [[nodiscard]] virtual Allocation allocate(int64_t bytes, const OpInfo& info = {}) = 0;
  /// Makes every pending and later operation fail with CommError{Aborted, why}. Thread-safe, bounded in time,
  /// idempotent.
  virtual void abort(const std::string& why) noexcept = 0;

 protected:
  Communicator() = default;
};

/// Closes the group on every way out of a scope; `finish()` returns the ticket on the good way.
class FSDPP_API Group {
 public:
  explicit Group(Communicator& comm) : comm_(&comm) { comm.group_begin(); }
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  [[nodiscard]] Ticket finish() { return std::exchange(comm_, nullptr)->group_end(); }

 private:
  Communicator* comm_;
};

}  // namespace fsdpp::comm

#pragma once
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/communicator.h"

namespace fsdpp::comm {

/// Key/value store of the rendezvous: wraps c10d's TCPStore behind a prefix of this run and restart. Thread-safe.
class FSDPP_API Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Blocks until the key exists. Throws CommError{Timeout} naming the key.
  [[nodiscard]] virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// The value, or nothing if the key is not there now. Never blocks.
  [[nodiscard]] virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Adds to a counter and returns the new value.
  virtual int64_t add(const std::string& key, int64_t delta) = 0;
};

struct WorldOptions {
  /// Device kind that this process computes on. CUDA: rank drives GPU `local_rank` (GPU local_rank / ranks_per_gpu when
  /// `FSDPP_RANKS_PER_GPU` is set, see fsdpp-run --ranks-per-gpu).
  c10::DeviceType device = c10::DeviceType::CPU;
  /// How long ranks wait for each other at the start, and for the members of a new communicator. Overridden by
  /// `FSDPP_RENDEZVOUS_S`.
  std::chrono::milliseconds rendezvous_timeout{std::chrono::seconds(60)};
  /// Default time-out of a collective, counted from its start. Overridden by `FSDPP_TIMEOUT_S`.
  std::chrono::milliseconds collective_timeout{std::chrono::seconds(300)};
};

/// How NCCL runs the operations of one communicator; other back ends take no notice. Equal on all ranks.
struct CommunicatorOptions {
  /// Gathers between buffers of Communicator::allocate by the GPUs' copy engines: no thread block is taken from computation. Not
  /// inside a stream capture (UsageError: NCCL can't), nor on CUDA's default stream.
  bool copy_engine = false;
  /// Thread blocks that an operation's kernel may take, at most; 0: as NCCL likes.
  int max_ctas = 0;
};

/// All ranks of a job, seen from this one. With several processes, one thread keeps this rank's heartbeat in the store
/// and watches the next rank's: one without a sign of life for `FSDPP_HEARTBEAT_S` seconds (30; 0: never) counts as
/// dead. The first failure that it or an NCCL communicator reports makes the communicators of all ranks fail with the
/// same message.
class FSDPP_API World {
 public:
  virtual ~World() = default;

  /// Reads the environment of fsdpp-run, torchrun (agent store included), Open MPI, MPICH/Intel MPI or Slurm, else one
  /// process; connects to the others; checks that every rank is there once. Collective. Call once, from the main
  /// thread. Throws ConfigError for missing or inconsistent variables, CommError{InitTimeout} when ranks are missing.
  [[nodiscard]] static std::shared_ptr<World> init(const WorldOptions& options = {});

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual int local_rank() const noexcept = 0;
  /// The device of this rank.
  [[nodiscard]] virtual c10::Device device() const noexcept = 0;
  /// Which launcher was recognised: "fsdpp-run", "torchrun", "openmpi", "mpich", "slurm", "single", "threads".
  [[nodiscard]] virtual const std::string& launcher() const noexcept = 0;
  [[nodiscard]] virtual Store& store() noexcept = 0;

  /// A new communicator among `ranks` (sorted world ranks that include this one; empty = all). Collective over them.
  /// Every rank gives the same `name`, unique within the world. NCCL for CUDA, host sockets for CPU.
  [[nodiscard]] virtual std::shared_ptr<Communicator> make_communicator(const std::string& name, std::vector<int> ranks = {},
                                                                        const CommunicatorOptions& options = {}) = 0;
  /// Blocks until all ranks are here (through the store).
  virtual void barrier() = 0;
};

/// Tells the launcher why this process is about to end: writes the file that fsdpp-run and torchrun name in
/// TORCHELASTIC_ERROR_FILE. For a program's outermost catch block; World::init does it by itself. No-op without that
/// variable.
FSDPP_API void report_failure(std::string_view message) noexcept;

/// One call that an in-process rank is about to make; see LocalWorldOptions::on_operation.
struct OperationEvent {
  std::string comm;       ///< communicator name
  std::string op;         ///< "all_gather", "reduce_scatter", …
  std::string label;      ///< OpInfo::label
  int rank = 0;           ///< world rank
  uint64_t sequence = 0;  ///< count of operations on this communicator, from 0
  int64_t count = 0;      ///< elements of `in`
};
/// What an injected fault does to the operation.
enum class Fault { None, Drop, Mismatch, Throw };

struct LocalWorldOptions {
  std::chrono::milliseconds collective_timeout{std::chrono::seconds(60)};
  /// Called before each operation of each rank, on that rank's thread; may sleep (delay) and returns the fault to
  /// inject.
  std::function<Fault(const OperationEvent&)> on_operation;
};

/// Runs `body` once for each of `size` ranks, each on its own thread with its own World (CPU device, in-process
/// communicators), autograd kept on that thread. Returns when all ended; rethrows the first failure, in rank order,
/// after aborting the others.
FSDPP_API void run_local_world(int size, const std::function<void(std::shared_ptr<World>)>& body,
                               const LocalWorldOptions& options = {});

}  // namespace fsdpp::comm

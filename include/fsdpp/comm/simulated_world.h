#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// One kind of link, and how long collectives over it take. Each rank sends and receives at `bytes_per_s` at once.
///
/// A ring of n ranks takes n − 1 steps, in each of which every rank passes on 1/n of the whole buffer of S bytes:
///   gather = (n − 1) · latency + S · (n − 1) / n / bytes_per_s.
/// Below `tree_below` bytes the steps double their reach instead: ⌈log2 n⌉ · latency, for the same bytes.
/// An all-reduce is a reduce-scatter and a gather; a broadcast is pipelined down a tree: ⌈log2 n⌉ · latency + S / bytes_per_s.
/// Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
struct FSDPP_API FabricLink {
  double bytes_per_s = 370e9;  ///< NVLink 4: what large collectives reach of its 450e9
  double latency_s = 5e-6;     ///< of a step
  int64_t tree_below = int64_t{1} << 16;

  /// Seconds of an all-gather, a reduce-scatter or an all-to-all; `bytes` of the whole buffer. 0 for one rank.
  [[nodiscard]] double gather(int64_t bytes, int ranks) const noexcept;
  [[nodiscard]] double all_reduce(int64_t bytes, int ranks) const noexcept;
  [[nodiscard]] double broadcast(int64_t bytes, int ranks) const noexcept;
};

struct SimulatedOptions {
  int ranks = 8;
  int ranks_per_node = 8;
  FabricLink within{};                                          ///< of communicators inside one node
  FabricLink between{.bytes_per_s = 50e9, .latency_s = 15e-6};  ///< of those that span nodes: one 400 Gb/s adapter for each rank
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// What one communicator did, by the model.
struct FabricUse {
  int64_t operations = 0;
  int64_t bytes = 0;   ///< of whole buffers
  double seconds = 0;  ///< of delay, whether or not delays are on
};

/// A network for studies: this process plays rank 0 of `ranks`, alone, so that memory, schedule and exposed communication at 8 …
/// 1,024 ranks can be seen on one device. Buffers have exactly the sizes that a real rank's have; values have not:
///   all_gather, all_to_all: own part in its place, copies of it in the others'.
///   reduce_scatter, all_reduce: own part, as if the other ranks had put in zeros (Sum) or the same (Max, Min).
///   broadcast: the buffer as it is. barrier: returns at once.
/// Training runs, then, but learns nothing.
///
/// Time: each operation delays its ticket by what the model says. CUDA: one thread spins on the caller's stream after the copies,
/// which come on top as they do not on a network; can be captured. CPU: tickets complete later, the values are there at once.
/// Operations of one communicator follow each other, those of two do not share a wire. Operations of a group are delayed one by
/// one.
class FSDPP_API SimulatedWorld : public World {
 public:
  /// ConfigError for fewer than one rank or node size, or a device that is not there.
  [[nodiscard]] static std::shared_ptr<SimulatedWorld> make(const SimulatedOptions& options);

  /// Off: a network that takes no time, for the difference that it makes. On at first.
  virtual void set_delays(bool on) noexcept = 0;
  /// By name of the communicator, since it was made or since reset_use().
  [[nodiscard]] virtual std::map<std::string, FabricUse> use() const = 0;
  virtual void reset_use() = 0;
};

}  // namespace fsdpp::comm

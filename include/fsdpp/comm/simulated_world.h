#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "fsdpp/base/export.h"
#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

/// One kind of link. Each rank sends and receives at `bytes_per_s` at once; a hop takes `latency_s`.
struct FabricLink {
  double bytes_per_s = 370e9;
  double latency_s = 3.4e-6;
};

/// How long collectives among some ranks take.
///
/// The ranks of a node follow each other in a ring, then comes the next node. Every rank passes on 1/n of the whole
/// buffer of S bytes n − 1 times; a part has then crossed nodes − 1 links between nodes and n − nodes within:
///   gather = (nodes − 1) · between.latency + (n − nodes) · within.latency + S · (n − 1) / n / bytes_per_s.
/// Each member of a node has an adapter of its own, and as many rings side by side use all of them: between nodes
/// `adapters` · between.bytes_per_s can flow, and the slower of that and `within` counts. Below `tree_below` bytes the
/// reach doubles with each step instead: ⌈log2 nodes⌉ hops between nodes and ⌈log2⌉ of a node's ranks within, for the
/// same bytes. A broadcast is pipelined down a tree: that latency + S / bytes_per_s. An all-reduce goes twice around
/// the ring or, where that is faster, up and down two trees at the same time: twice a broadcast. Sources: Thakur,
/// Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); Sanders, Speck, Träff,
/// "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); hops and their times: NCCL's own
/// model (src/graph/tuning.cc, simple protocol).
struct FSDPP_API FabricRing {
  int ranks = 1, nodes = 1;
  int adapters = 1;  ///< ranks on the node that has the fewest
  FabricLink within, between;
  static constexpr int64_t kTreeBelow = int64_t{1} << 16;
  int64_t tree_below = kTreeBelow;

  /// Seconds of an all-gather, a reduce-scatter or an all-to-all; `bytes` of the whole buffer. 0 for one rank.
  [[nodiscard]] double gather(int64_t bytes) const noexcept;
  [[nodiscard]] double all_reduce(int64_t bytes) const noexcept;
  [[nodiscard]] double broadcast(int64_t bytes) const noexcept;

 private:
  [[nodiscard]] double bytes_per_s() const noexcept;
  [[nodiscard]] double ring_latency() const noexcept;
  [[nodiscard]] double tree_latency() const noexcept;
};

struct SimulatedOptions {
  int ranks = 8;
  int ranks_per_node = 8;
  FabricLink within{};                                          ///< NVLink 4: what large collectives reach of its 450e9
  FabricLink between{.bytes_per_s = 50e9, .latency_s = 14e-6};  ///< one 400 Gb/s adapter for each rank
  int64_t tree_below = FabricRing::kTreeBelow;
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// What one communicator did, by the model.
struct FabricUse {
  int64_t operations = 0;
  int64_t bytes = 0;   ///< of whole buffers
  double seconds = 0;  ///< of delay, whether or not delays are on
};

/// A network for studies: this process plays rank 0 of `ranks`, alone, so that memory, schedule and exposed
/// communication at 8 … 1,024 ranks can be seen on one device. Buffers have exactly the sizes that a real rank's have;
/// values have not:
///   all_gather, all_to_all: own part in its place, copies of it in the others'.
///   reduce_scatter, all_reduce: own part, as if the other ranks had put in zeros (Sum) or the same (Max, Min).
///   broadcast: the buffer as it is. barrier: returns at once.
/// Training runs, then, but learns nothing.
///
/// Time: each operation delays its ticket by what the model says. CUDA: one thread spins on the caller's stream after
/// the copies, which come on top as they do not on a network; can be captured, and replays are delayed and counted like
/// any other work. CPU: tickets complete later, the values are there at once. Operations of communicators inside nodes
/// share one wire, those of communicators that span nodes another: first come, first served (CUDA: as the device comes
/// to them, on any stream; CPU: as issued), each at the full rate, so that two at once end as late as on a network that
/// they share evenly, the first of them earlier. Operations of a group are delayed one by one.
class FSDPP_API SimulatedWorld : public World {
 public:
  /// ConfigError for fewer than one rank or node size, or a device that is not there.
  [[nodiscard]] static std::shared_ptr<SimulatedWorld> make(const SimulatedOptions& options);

  /// Off: a network that takes no time, for the difference that it makes. On at first. Waits for the device.
  virtual void set_delays(bool on) = 0;
  /// By name of the communicator, since it was made or since reset_use(). Both wait for the device.
  [[nodiscard]] virtual std::map<std::string, FabricUse> use() const = 0;
  virtual void reset_use() = 0;
};

}  // namespace fsdpp::comm

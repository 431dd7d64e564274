#pragma once
struct CUstream_st;

namespace fsdpp::cuda {

/// Wires of a modelled network, in device memory that starts as zeros.
struct WireState {
  static constexpr int kWires = 2, kUsers = 1024;
  struct Use {
    unsigned long long operations, bytes, nanoseconds;
  };
  unsigned long long free_at[kWires];  ///< when a wire is done with what it took, by the device's clock
  unsigned long long delays;           ///< 0: no time passes
  Use use[kUsers];
};

struct WireLoad {
  int wire = 0, user = 0;
  unsigned long long bytes = 0, nanoseconds = 0;
};

/// Queues a one-thread kernel that counts the load and spins until the wire, which takes one load after the other as
/// the device comes to them, has carried it. Returns a cudaError_t as int.
int launch_wire(WireState* state, const WireLoad& load, CUstream_st* stream);

}  // namespace fsdpp::cuda

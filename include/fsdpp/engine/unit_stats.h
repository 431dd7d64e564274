#pragma once
#include <cstdint>

namespace fsdpp {

/// Counts since the unit was made (or since reset_stats). For tests and benchmarks.
struct UnitStats {
  int64_t gathers = 0;          ///< all-gathers issued (forward, backward and explicit; 0 of them on the wire at shard size 1)
  int64_t forward_gathers = 0;  ///< of those, issued for a forward
  int64_t backward_gathers = 0; ///< of those, issued for a backward
  int64_t reduces = 0;          ///< reduce-scatters issued
  int64_t reshards = 0;
};

/// Bytes of a unit on this rank.
struct UnitMemory {
  int64_t shard_bytes = 0;     ///< parameters, original dtype
  int64_t gathered_bytes = 0;  ///< gathered buffer (0 where the gathered parameters are the shard itself)
  int64_t gradient_bytes = 0;  ///< gradient buffer, reduce dtype
  int64_t sharded_gradient_bytes = 0;
};

}  // namespace fsdpp

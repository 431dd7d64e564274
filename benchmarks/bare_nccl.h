#pragma once
// The loop that bench_collectives compares with: NCCL's own calls on a communicator of their own, nothing around them.
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdpp/comm/world.h"

namespace bench {

class BareCollectives {
 public:
  virtual ~BareCollectives() = default;
  BareCollectives(const BareCollectives&) = delete;
  BareCollectives& operator=(const BareCollectives&) = delete;
  /// `count` elements of each rank; queued on `stream`. Throws fsdpp::CommError.
  virtual void all_gather(void* out, const void* in, int64_t count, c10::ScalarType dtype, fsdpp::cuda::StreamView stream) = 0;
  virtual void reduce_scatter(void* out, const void* in, int64_t count, c10::ScalarType dtype,
                              fsdpp::cuda::StreamView stream) = 0;
  /// "2.28.9".
  [[nodiscard]] virtual std::string version() const = 0;

 protected:
  BareCollectives() = default;
};

/// All ranks of the world. Null on the CPU, where there is nothing to compare with. Collective.
[[nodiscard]] std::unique_ptr<BareCollectives> make_bare_collectives(fsdpp::comm::World& world);

}  // namespace bench

#pragma once
#include <memory>

#include "comm/bootstrap.h"
#include "comm/front.h"

namespace fsdpp::comm {

/// CUDA tensors over NCCL. Operations are queued on the caller's stream; a ticket is an event recorded behind them.
/// Inside a stream capture an operation becomes part of the graph: its ticket may be waited for by streams of the
/// capture only, and the watchdog does not time it. Collective. Throws CommError{InitTimeout} naming the ranks that did
/// not come.
[[nodiscard]] std::shared_ptr<Communicator> make_nccl_communicator(CommInfo info, const Bootstrap& bootstrap);

}  // namespace fsdpp::comm

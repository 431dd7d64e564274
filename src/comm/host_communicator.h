#pragma once
#include <memory>

#include "comm/bootstrap.h"
#include "comm/front.h"

namespace fsdpp::comm {

/// CPU tensors over sockets: local ones between ranks of one host, TCP between hosts. One worker thread carries out the
/// operations in issue order, each with all peers at once; sums are in fixed rank order (see reduce.h). Collective.
/// Throws CommError{InitTimeout} naming the ranks that did not come.
[[nodiscard]] std::shared_ptr<Communicator> make_host_communicator(CommInfo info, const Bootstrap& bootstrap);

}  // namespace fsdpp::comm

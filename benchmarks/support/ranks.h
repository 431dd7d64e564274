#pragma once
// Figures of all ranks brought together.
#include <vector>

#include "fsdpp/comm/communicator.h"

namespace bench {

/// Of each sample the largest rank's. Every rank gives as many. Collective; blocks the host.
[[nodiscard]] std::vector<double> largest_over_ranks(fsdpp::comm::Communicator& comm, const std::vector<double>& samples);

}  // namespace bench

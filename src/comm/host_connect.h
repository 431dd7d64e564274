#pragma once
#include <vector>

#include "comm/bootstrap.h"
#include "comm/front.h"
#include "comm/socket.h"

namespace fsdpp::comm {

/// Connects every pair of members; result[r] leads to member r (the own one is invalid). Collective.
[[nodiscard]] std::vector<Socket> connect_members(const CommInfo& info, const Bootstrap& bootstrap);

}  // namespace fsdpp::comm

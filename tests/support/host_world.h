#pragma once
#include <functional>
#include <memory>

#include "fsdpp/comm/world.h"

namespace fsdpp::test {

struct HostWorldOptions {
  std::chrono::milliseconds collective_timeout{20000};
  std::chrono::milliseconds rendezvous_timeout{20000};
};

/// Runs `body` for each of `size` ranks, each on its own thread with its own host communicators over loopback sockets,
/// and a store in memory. A failure of one rank is no news to the others but through their communicators. Rethrows the
/// first failure in rank order.
void run_host_world(int size, const std::function<void(std::shared_ptr<comm::World>)>& body,
                    const HostWorldOptions& options = {});

}  // namespace fsdpp::test

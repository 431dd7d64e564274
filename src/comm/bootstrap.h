#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "fsdpp/comm/world.h"

namespace fsdpp::comm {

class Watchdog;

/// What the members of a new communicator need to find each other.
struct Bootstrap {
  std::shared_ptr<Store> store;
  std::string key;          ///< of the communicator, equal on its members and different from all others
  std::string master_addr;  ///< for finding this host's own address on the way to the others
  std::chrono::milliseconds timeout{0};
  Watchdog* watchdog = nullptr;  ///< may be null
};

}  // namespace fsdpp::comm

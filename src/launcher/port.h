#pragma once
#include "launcher/unique_fd.h"

namespace fsdpp::launcher {

/// A TCP port of this host that no other job will be given while this object lives.
///
/// The port stays bound (not listening) with SO_REUSEADDR, so that rank 0's store, which sets SO_REUSEADDR as well, can
/// listen on it, while every other bind to "any free port" passes it by. Where the kernel does not allow that, the port
/// is released at once and only very likely still free.
class PortReservation {
 public:
  PortReservation();
  [[nodiscard]] int port() const noexcept { return port_; }
  [[nodiscard]] bool held() const noexcept { return static_cast<bool>(holder_); }

 private:
  UniqueFd holder_;
  int port_ = 0;
};

/// Whether a server can listen on `port` of this host now.
[[nodiscard]] bool can_listen(int port);

}  // namespace fsdpp::launcher

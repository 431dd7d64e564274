#include "launcher/port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/enforce.h"

namespace fsdpp::launcher {
namespace {

// A bound socket on all addresses: IPv6 with IPv4 mapped in, or plain IPv4 where there is no IPv6.
UniqueFd bind_any(int port, bool reuse) {
  for (int family : {AF_INET6, AF_INET}) {
    UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) continue;
    const int on = 1, off = 0;
    if (reuse) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage storage{};
    socklen_t length = 0;
    if (family == AF_INET6) {
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      auto* address = reinterpret_cast<sockaddr_in6*>(&storage);
      address->sin6_family = AF_INET6;
      address->sin6_port = htons(static_cast<uint16_t>(port));
      length = sizeof(sockaddr_in6);
    } else {
      auto* address = reinterpret_cast<sockaddr_in*>(&storage);
      address->sin_family = AF_INET;
      address->sin_port = htons(static_cast<uint16_t>(port));
      length = sizeof(sockaddr_in);
    }
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&storage), length) == 0) return fd;
    if (errno == EADDRINUSE) return {};
  }
  return {};
}

int port_of(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return 0;
  return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&storage)->sin_port);
}

}  // namespace

PortReservation::PortReservation() : holder_(bind_any(0, false)) {
  if (holder_) port_ = port_of(holder_.get());
  if (port_ == 0)
    fail<Error>("fsdpp-run: no free TCP port on this host ({}). Try: --master-port P", std::strerror(errno));
  const int on = 1;
  ::setsockopt(holder_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!can_listen(port_)) holder_.reset();
}

bool can_listen(int port) {
  UniqueFd fd = bind_any(port, true);
  return fd && ::listen(fd.get(), 1) == 0;
}

}  // namespace fsdpp::launcher

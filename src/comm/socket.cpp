#include "comm/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <memory>

namespace fsdpp::comm {
namespace {

constexpr int kBacklog = 1024;

void set_option(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

Socket bind_and_listen(int family, const sockaddr* address, socklen_t length) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return socket;
  if (family != AF_UNIX) set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) set_option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (::bind(socket.fd(), address, length) != 0 || ::listen(socket.fd(), kBacklog) != 0) return {};
  return socket;
}

struct AddrInfoFree {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddrInfo = std::unique_ptr<addrinfo, AddrInfoFree>;

AddrInfo resolve(const std::string& host, const std::string& port, int type) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &list) != 0) list = nullptr;
  return AddrInfo(list);
}

std::pair<sockaddr_un, socklen_t> local_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);  // a leading zero byte: abstract
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

bool wait_for(int fd, short events, Deadline deadline) {
  pollfd entry{fd, events, 0};
  while (true) {
    const int ready = ::poll(&entry, 1, poll_ms(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (std::chrono::steady_clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
  }
}

bool finish_connect(int fd, Deadline deadline) {
  if (!wait_for(fd, POLLOUT, deadline)) return false;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  errno = error;
  return error == 0;
}

}  // namespace

int poll_ms(Deadline deadline, int cap) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, cap));
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

Socket listen_tcp(uint16_t port) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(port);
  Socket socket = bind_and_listen(AF_INET6, reinterpret_cast<const sockaddr*>(&any6), sizeof any6);
  if (socket.valid() || errno == EADDRINUSE || errno == EACCES) return socket;
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_port = htons(port);
  return bind_and_listen(AF_INET, reinterpret_cast<const sockaddr*>(&any4), sizeof any4);
}

Socket listen_local(const std::string& name) {
  const auto [address, length] = local_address(name);
  return bind_and_listen(AF_UNIX, reinterpret_cast<const sockaddr*>(&address), length);
}

uint16_t port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return address.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port)
                                       : ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Socket connect_tcp(const std::string& address, uint16_t port, Deadline deadline) {
  const AddrInfo list = resolve(address, std::to_string(port), SOCK_STREAM);
  if (!list) errno = EHOSTUNREACH;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    Socket socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) continue;
    if (::connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) != 0 &&
        (errno != EINPROGRESS || !finish_connect(socket.fd(), deadline)))
      continue;
    set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
    return socket;
  }
  return {};
}

Socket connect_local(const std::string& name) {
  const auto [address, length] = local_address(name);
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid() || ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  ::fcntl(socket.fd(), F_SETFL, O_NONBLOCK);
  return socket;
}

Socket accept_any(const Socket& a, const Socket& b, Deadline deadline) {
  std::array<pollfd, 2> entries{pollfd{a.fd(), POLLIN, 0}, pollfd{b.fd(), POLLIN, 0}};
  while (true) {
    ::poll(entries.data(), entries.size(), poll_ms(deadline));
    for (const auto& entry : entries) {
      if ((entry.revents & POLLIN) == 0) continue;
      Socket socket(::accept4(entry.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) continue;
      set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);  // fails without harm on a local socket
      return socket;
    }
    if (std::chrono::steady_clock::now() >= deadline) return {};
  }
}

bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(socket.fd(), from, bytes, MSG_NOSIGNAL);
    if (n > 0) {
      from += n;
      bytes -= static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (!wait_for(socket.fd(), POLLOUT, deadline)) return false;
    } else {
      return false;
    }
  }
  return true;
}

bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket.fd(), to, bytes, 0);
    if (n > 0) {
      to += n;
      bytes -= static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (!wait_for(socket.fd(), POLLIN, deadline)) return false;
    } else {
      return false;
    }
  }
  return true;
}

std::string address_towards(const std::string& peer) {
  const AddrInfo list = resolve(peer, "9", SOCK_DGRAM);
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const Socket socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (!socket.valid() || ::connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) != 0 ||
        ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &length) != 0)
      continue;
    char text[NI_MAXHOST] = {};
    if (::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      return text;
  }
  return "127.0.0.1";
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown-host";
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};  // "net:[4026531840]"
  if (::readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = '\0';
  return host_name() + "/" + boot + "/" + space;
}

}  // namespace fsdpp::comm

#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace fsdpp::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// Milliseconds until `deadline` for poll(2): 0 or more, at most `cap`.
[[nodiscard]] int poll_ms(Deadline deadline, int cap = 1000);

/// Owned file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  /// Gives the descriptor away.
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Listens on all interfaces (IPv6 and IPv4 where the host has both). port 0: any free one. Invalid socket on failure,
/// with the reason in errno.
[[nodiscard]] Socket listen_tcp(uint16_t port);
/// Listens on a socket in Linux' abstract namespace: this host and network namespace only.
[[nodiscard]] Socket listen_local(const std::string& name);
[[nodiscard]] uint16_t port_of(const Socket& socket);

/// One try each. Invalid socket on failure, with the reason in errno.
[[nodiscard]] Socket connect_tcp(const std::string& address, uint16_t port, Deadline deadline);
[[nodiscard]] Socket connect_local(const std::string& name);
/// The next connection of either listener, or an invalid socket when the deadline passes.
[[nodiscard]] Socket accept_any(const Socket& a, const Socket& b, Deadline deadline);

/// Moves exactly `bytes`, or returns false (closed, failed, or too late).
[[nodiscard]] bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
[[nodiscard]] bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

/// This host's address on the way to `peer`; 127.0.0.1 if there is no way.
[[nodiscard]] std::string address_towards(const std::string& peer);
/// Equal for two processes exactly if they can reach each other through listen_local.
[[nodiscard]] std::string host_identity();
[[nodiscard]] std::string host_name();

}  // namespace fsdpp::comm

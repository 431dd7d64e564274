#pragma once
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/host_frame.h"
#include "comm/socket.h"

namespace fsdpp::comm {

/// Bytes to send to and to receive from one peer in one exchange. Owns nothing.
struct Transfer {
  const void* send = nullptr;
  size_t send_bytes = 0;
  void* receive = nullptr;
  size_t receive_bytes = 0;
};

/// Why an exchange failed; caught by the communicator's worker.
struct ExchangeFailure {
  CommErrc code;
  std::string text;
  int closed_by = -1;  ///< member whose connection ended, or -1
};

/// The connections of one rank to all others, and the exchange of one frame with each of them at once. Used by one
/// thread; wake() by any.
class HostWire {
 public:
  /// sockets[r] leads to member r; the own one is invalid. `names` are the members' world ranks.
  HostWire(std::string comm, int rank, std::vector<int> world_ranks, std::vector<Socket> sockets);

  /// Sends each peer a header for `op` and its bytes while receiving theirs. Throws ExchangeFailure for a mismatch, a
  /// closed connection, a peer's own failure, time-out, and when `interrupted` (asked after each wake-up) returns a
  /// failure.
  void exchange(const Op& op, uint8_t phase, std::span<const Transfer> transfers,
                const std::function<std::optional<ExchangeFailure>()>& interrupted);
  /// Tells every peer that this rank has failed where the stream allows it, then closes the sending side.
  void send_failure(CommErrc code, const std::string& text) noexcept;
  /// Makes a waiting exchange ask `interrupted` now.
  void wake() noexcept;

 private:
  struct Link {
    Socket socket;
    FrameHeader out, in;
    Transfer transfer;
    size_t sent = 0, received = 0;  // header and payload together
    bool listening = false;         // complete on our side, but the peer may still report a failure

    [[nodiscard]] size_t send_total() const { return sizeof out + transfer.send_bytes; }
    [[nodiscard]] size_t receive_total() const { return sizeof in + transfer.receive_bytes; }
    [[nodiscard]] bool sending() const { return socket.valid() && sent < send_total(); }
    [[nodiscard]] bool receiving() const { return socket.valid() && received < receive_total(); }
  };

  void start(const Op& op, uint8_t phase, std::span<const Transfer> transfers);
  bool progress(const Op& op);
  bool send_some(size_t peer, const Op& op);
  bool receive_some(size_t peer, const Op& op);
  void check_header(size_t peer, const Op& op);
  void listen_for_failure(size_t peer);
  [[noreturn]] void take_failure(size_t peer);
  [[noreturn]] void closed(size_t peer, const Op& op);
  [[noreturn]] void timed_out(const Op& op);
  void wait(Deadline deadline);
  [[nodiscard]] bool finished() const;

  const std::string comm_;
  const int rank_;
  const std::vector<int> world_ranks_;
  std::vector<Link> links_;
  Socket wake_;  // an eventfd
};

}  // namespace fsdpp::comm

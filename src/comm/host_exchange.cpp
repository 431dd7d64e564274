#include "comm/host_exchange.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kChunk = 1 << 20;  // bytes for one peer before the next one gets its turn

// What is left of header + payload as at most two pieces.
int pieces(std::array<iovec, 2>& out, void* header, size_t header_bytes, void* payload, size_t payload_bytes,
           size_t done) {
  int n = 0;
  if (done < header_bytes) {
    out[n++] = {static_cast<char*>(header) + done, header_bytes - done};
    done = header_bytes;
  }
  const size_t offset = done - header_bytes;
  if (offset < payload_bytes)
    out[n++] = {static_cast<char*>(payload) + offset, std::min(payload_bytes - offset, kChunk)};
  return n;
}

bool again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

HostWire::HostWire(std::string comm, int rank, std::vector<int> world_ranks, std::vector<Socket> sockets)
    : comm_(std::move(comm)),
      rank_(rank),
      world_ranks_(std::move(world_ranks)),
      links_(sockets.size()),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (size_t r = 0; r < sockets.size(); ++r) links_[r].socket = std::move(sockets[r]);
}

void HostWire::start(const Op& op, uint8_t phase, std::span<const Transfer> transfers) {
  for (size_t r = 0; r < links_.size(); ++r) {
    Link& link = links_[r];
    link.transfer = transfers[r];
    link.out = frame_of(op, phase, transfers[r].send_bytes);
    link.sent = link.received = 0;
    link.listening = link.socket.valid();
  }
}

bool HostWire::finished() const {
  return std::none_of(links_.begin(), links_.end(),
                      [](const Link& link) { return link.sending() || link.receiving(); });
}

void HostWire::exchange(const Op& op, uint8_t phase, std::span<const Transfer> transfers,
                        const std::function<std::optional<ExchangeFailure>()>& interrupted) {
  start(op, phase, transfers);
  const Deadline deadline = Clock::now() + op.timeout;
  while (true) {
    const bool moved = progress(op);
    if (finished()) return;
    if (auto failure = interrupted()) throw ExchangeFailure(*failure);
    if (moved) continue;
    if (Clock::now() >= deadline) timed_out(op);
    wait(deadline);
  }
}

bool HostWire::progress(const Op& op) {
  bool moved = false;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer].receiving()) moved |= receive_some(peer, op);
    if (links_[peer].sending()) moved |= send_some(peer, op);
    if (!links_[peer].receiving() && links_[peer].listening) listen_for_failure(peer);
  }
  return moved;
}

bool HostWire::send_some(size_t peer, const Op& op) {
  Link& link = links_[peer];
  std::array<iovec, 2> parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = static_cast<size_t>(pieces(
      parts, &link.out, sizeof link.out, const_cast<void*>(link.transfer.send), link.transfer.send_bytes, link.sent));
  const ssize_t n = ::sendmsg(link.socket.fd(), &message, MSG_NOSIGNAL);
  if (n < 0 && again(errno)) return false;
  if (n <= 0) {
    while (link.receiving() && receive_some(peer, op)) {  // it may have told us why before it closed
    }
    closed(peer, op);
  }
  link.sent += static_cast<size_t>(n);
  return true;
}

bool HostWire::receive_some(size_t peer, const Op& op) {
  Link& link = links_[peer];
  std::array<iovec, 2> parts;
  // The header first and alone: where the payload goes depends on it.
  const size_t payload = link.received < sizeof link.in ? 0 : link.transfer.receive_bytes;
  const int count = pieces(parts, &link.in, sizeof link.in, link.transfer.receive, payload, link.received);
  const ssize_t n = ::readv(link.socket.fd(), parts.data(), count);
  if (n < 0 && again(errno)) return false;
  if (n <= 0) closed(peer, op);
  const bool header_was_open = link.received < sizeof link.in;
  link.received += static_cast<size_t>(n);
  if (header_was_open && link.received == sizeof link.in) check_header(peer, op);
  return true;
}

void HostWire::check_header(size_t peer, const Op& op) {
  Link& link = links_[peer];
  if (link.in.magic != kFrameMagic)
    throw ExchangeFailure{CommErrc::Backend, fmt::format("communicator '{}': rank {} sent bytes that are no frame",
                                                         comm_, world_ranks_[peer])};
  if (link.in.kind == kFailureFrame) take_failure(peer);
  if (agree(link.out, link.in) && link.in.payload == link.transfer.receive_bytes) return;
  const int me = world_ranks_[static_cast<size_t>(rank_)];
  const int they = world_ranks_[peer];
  const auto mine = describe(link.out), theirs = describe(link.in);
  throw ExchangeFailure{CommErrc::Mismatch, me < they ? mismatch_text(comm_, op.sequence, me, mine, they, theirs)
                                                      : mismatch_text(comm_, op.sequence, they, theirs, me, mine)};
}

// A peer whose part is complete may fail while we wait for a third one. Anything else that it sends belongs to its next
// operation, and if it ends in good order, that is its right.
void HostWire::listen_for_failure(size_t peer) {
  Link& link = links_[peer];
  FrameHeader next;
  const ssize_t n = ::recv(link.socket.fd(), &next, sizeof next, MSG_PEEK);
  if (n < 0 && again(errno)) return;
  if (n == static_cast<ssize_t>(sizeof next) && next.magic == kFrameMagic && next.kind == kFailureFrame) {
    (void)::recv(link.socket.fd(), &link.in, sizeof link.in, 0);
    take_failure(peer);
  }
  if (n <= 0 || n == static_cast<ssize_t>(sizeof next)) link.listening = false;
}

void HostWire::take_failure(size_t peer) {
  Link& link = links_[peer];
  std::string text(std::min(link.in.payload, kMaxFailureText), '\0');
  if (!receive_all(link.socket, text.data(), text.size(), Clock::now() + std::chrono::seconds(1)))
    text = fmt::format("communicator '{}': rank {} has failed", comm_, world_ranks_[peer]);
  throw ExchangeFailure{static_cast<CommErrc>(link.in.code), text};
}

void HostWire::closed(size_t peer, const Op& op) {
  throw ExchangeFailure{CommErrc::RemoteDied,
                        fmt::format("communicator '{}': rank {} has ended (its connection closed) during {}", comm_,
                                    world_ranks_[peer], short_name(op)),
                        static_cast<int>(peer)};
}

void HostWire::timed_out(const Op& op) {
  std::string absent, stalled;
  for (size_t r = 0; r < links_.size(); ++r) {
    const Link& link = links_[r];
    if (!link.receiving() && !link.sending()) continue;
    if (link.received == 0)
      absent += fmt::format("{}{}", absent.empty() ? "" : ", ", world_ranks_[r]);
    else
      stalled += fmt::format("{}{} ({} of {} bytes received, {} of {} sent)", stalled.empty() ? "" : ", ",
                             world_ranks_[r], link.received, link.receive_total(), link.sent, link.send_total());
  }
  std::string text = fmt::format("communicator '{}': {} made no progress for {} s", comm_, short_name(op),
                                 static_cast<double>(op.timeout.count()) / 1e3);
  if (!absent.empty()) text += fmt::format(": never issued by rank {}", absent);
  if (!stalled.empty()) text += fmt::format("{} stalled with rank {}", absent.empty() ? ":" : ";", stalled);
  throw ExchangeFailure{CommErrc::Timeout, text};
}

void HostWire::wait(Deadline deadline) {
  std::vector<pollfd> entries{{wake_.fd(), POLLIN, 0}};
  for (const Link& link : links_) {
    const short events =
        static_cast<short>((link.receiving() || link.listening ? POLLIN : 0) | (link.sending() ? POLLOUT : 0));
    if (events != 0) entries.push_back({link.socket.fd(), events, 0});
  }
  ::poll(entries.data(), entries.size(), poll_ms(deadline));
  if ((entries[0].revents & POLLIN) != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(wake_.fd(), &count, sizeof count);
  }
}

void HostWire::send_failure(CommErrc code, const std::string& text) noexcept {
  const auto deadline = Clock::now() + std::chrono::milliseconds(500);
  const FrameHeader frame = failure_frame(code, std::min<uint64_t>(text.size(), kMaxFailureText));
  for (Link& link : links_) {
    if (!link.socket.valid()) continue;
    const bool between_frames = link.sent == 0 || link.sent == link.send_total();
    if (between_frames && send_all(link.socket, &frame, sizeof frame, deadline))
      (void)send_all(link.socket, text.data(), frame.payload, deadline);
    ::shutdown(link.socket.fd(), SHUT_WR);
  }
}

void HostWire::wake() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.fd(), &one, sizeof one);
}

}  // namespace fsdpp::comm

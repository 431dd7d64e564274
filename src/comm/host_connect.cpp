#include "comm/host_connect.h"

#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include "base/enforce.h"
#include "comm/store.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// How to reach one member.
struct Endpoint {
  std::string address;
  uint16_t port = 0;
  uint64_t token = 0;  ///< a caller must show it
  std::string local;   ///< name of the local listener
  std::string host;    ///< host_identity()

  [[nodiscard]] std::string encode() const { return fmt::format("{} {} {} {} {}", address, port, token, local, host); }
  static Endpoint decode(const std::string& text) {
    Endpoint result;
    std::istringstream in(text);
    in >> result.address >> result.port >> result.token >> result.local;
    std::getline(in >> std::ws, result.host);
    return result;
  }
};

struct Hello {
  uint64_t token = 0;
  int32_t rank = -1;
  uint32_t magic = 0x48454C4F;
};

uint64_t random_token() {
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

class Connector {
 public:
  Connector(const CommInfo& info, const Bootstrap& bootstrap)
      : info_(info), boot_(bootstrap), deadline_(Clock::now() + bootstrap.timeout), sockets_(info.ranks.size()) {}

  std::vector<Socket> run() {
    publish();
    for (int r = 0; r < info_.rank; ++r) call(r);
    for (auto missing = sockets_.size() - static_cast<size_t>(info_.rank) - 1; missing > 0; --missing) answer();
    return std::move(sockets_);
  }

 private:
  [[nodiscard]] std::string key(int r) const { return fmt::format("comm/{}/address/{}", boot_.key, r); }
  [[nodiscard]] int world_rank(int r) const { return info_.ranks[static_cast<size_t>(r)]; }

  void publish() {
    self_.token = random_token();
    self_.local = fmt::format("fsdpp-{:016x}", random_token());
    self_.host = host_identity();
    self_.address = address_towards(boot_.master_addr);
    tcp_ = listen_tcp(0);
    local_ = listen_local(self_.local);
    FSDPP_ENFORCE(tcp_.valid() && local_.valid(), ConfigError, "communicator '{}': can't listen on a socket: {}",
                  info_.name, std::strerror(errno));
    self_.port = port_of(tcp_);
    boot_.store->set(key(info_.rank), self_.encode());
  }

  Endpoint find(int r) {
    try {
      return Endpoint::decode(
          boot_.store->get(key(r), std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now())));
    } catch (const CommError& error) {
      if (error.code() != CommErrc::Timeout) throw;
      fail_comm(CommErrc::InitTimeout,
                "communicator '{}': rank {} did not create it within {} s. Try: every member must call it", info_.name,
                world_rank(r), static_cast<double>(boot_.timeout.count()) / 1e3);
    }
  }

  void call(int r) {
    const Endpoint peer = find(r);
    const bool same_host = peer.host == self_.host;
    Backoff backoff;
    while (true) {
      Socket socket = same_host ? connect_local(peer.local) : connect_tcp(peer.address, peer.port, deadline_);
      const int reason = errno;
      const Hello hello{peer.token, info_.rank};
      if (socket.valid() && send_all(socket, &hello, sizeof hello, deadline_)) {
        sockets_[static_cast<size_t>(r)] = std::move(socket);
        return;
      }
      if (Clock::now() >= deadline_)
        fail_comm(CommErrc::InitTimeout, "communicator '{}': no connection to rank {} at {}:{} within {} s: {}",
                  info_.name, world_rank(r), peer.address, peer.port, static_cast<double>(boot_.timeout.count()) / 1e3,
                  std::strerror(reason));
      backoff.pause();
    }
  }

  void answer() {
    while (true) {
      Socket socket = accept_any(tcp_, local_, deadline_);
      if (!socket.valid()) late();
      Hello hello;
      if (!receive_all(socket, &hello, sizeof hello, std::min(deadline_, Clock::now() + std::chrono::seconds(5))))
        continue;
      const bool known = hello.magic == Hello{}.magic && hello.token == self_.token && hello.rank > info_.rank &&
                         hello.rank < static_cast<int>(sockets_.size()) &&
                         !sockets_[static_cast<size_t>(hello.rank)].valid();
      if (!known) continue;  // a stranger
      sockets_[static_cast<size_t>(hello.rank)] = std::move(socket);
      return;
    }
  }

  [[noreturn]] void late() {
    std::string absent;
    for (int r = info_.rank + 1; r < static_cast<int>(sockets_.size()); ++r)
      if (!sockets_[static_cast<size_t>(r)].valid())
        absent += fmt::format("{}{}", absent.empty() ? "" : ", ", world_rank(r));
    fail_comm(CommErrc::InitTimeout,
              "communicator '{}': rank {} did not connect within {} s. Try: every member must create it", info_.name,
              absent, static_cast<double>(boot_.timeout.count()) / 1e3);
  }

  const CommInfo& info_;
  const Bootstrap& boot_;
  Deadline deadline_;
  std::vector<Socket> sockets_;
  Endpoint self_;
  Socket tcp_, local_;
};

}  // namespace

std::vector<Socket> connect_members(const CommInfo& info, const Bootstrap& bootstrap) {
  return Connector(info, bootstrap).run();
}

}  // namespace fsdpp::comm

#pragma once
#include <functional>
#include <memory>

#include "comm/host_exchange.h"

namespace fsdpp::comm {

/// Carries out operations over a wire, on the worker's thread. Every message goes straight from its source to its
/// destination; what is to be summed is received beside each other and summed in rank order.
class HostAlgorithms {
 public:
  using Interrupted = std::function<std::optional<ExchangeFailure>()>;
  HostAlgorithms(HostWire& wire, int rank, int size, Interrupted interrupted)
      : wire_(wire),
        rank_(static_cast<size_t>(rank)),
        size_(static_cast<size_t>(size)),
        interrupted_(std::move(interrupted)) {}

  void run(const Op& op);

 private:
  void all_gather(const Op& op);
  void reduce_scatter(const Op& op);
  void all_reduce(const Op& op);
  void all_reduce_small(const Op& op);
  void broadcast(const Op& op);
  void all_to_all(const Op& op);

  std::vector<Transfer> transfers() const { return std::vector<Transfer>(size_); }
  void exchange(const Op& op, uint8_t phase, const std::vector<Transfer>& transfers) {
    wire_.exchange(op, phase, transfers, interrupted_);
  }
  char* scratch(size_t bytes);

  HostWire& wire_;
  const size_t rank_, size_;
  Interrupted interrupted_;
  std::unique_ptr<char[]> scratch_;
  size_t scratch_bytes_ = 0;
};

}  // namespace fsdpp::comm

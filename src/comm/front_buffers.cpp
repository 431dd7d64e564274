// Memory for operands: the ranks agree on what they ask for before anything is registered.
#include <c10/util/Exception.h>

#include <array>
#include <map>

#include "base/enforce.h"
#include "comm/front.h"
#include "comm/window_support.h"

namespace fsdpp::comm {
namespace {

/// What each rank tells the others.
struct Request {
  int64_t bytes, registrations, copy_engine, has_memory;
};
using Requests = std::vector<Request>;

// "4096 on rank 0, 8192 on ranks 1, 2"
std::string by_value(const Requests& all, int64_t Request::* field, const std::vector<int>& ranks) {
  std::map<int64_t, std::vector<int>> groups;
  for (size_t i = 0; i < all.size(); ++i) groups[all[i].*field].push_back(ranks[i]);
  std::vector<std::string> parts;
  for (const auto& [value, who] : groups)
    parts.push_back(fmt::format("{} on {} {}", value, who.size() == 1 ? "rank" : "ranks", fmt::join(who, ", ")));
  return fmt::format("{}", fmt::join(parts, ", "));
}

bool differs(const Requests& all, int64_t Request::* field) {
  for (const auto& one : all)
    if (one.*field != all.front().*field) return true;
  return false;
}

void check_agreement(const std::string& who, const Requests& all, const std::vector<int>& ranks) {
  if (differs(all, &Request::bytes))
    fail_comm(CommErrc::Mismatch, "{}: expected as many bytes on every rank, got {}. Try: the same sizes in the same order on all ranks", who,
              by_value(all, &Request::bytes, ranks));
  if (differs(all, &Request::copy_engine))
    fail_comm(CommErrc::Mismatch, "{}: expected CommunicatorOptions::copy_engine to be the same on every rank, got {}", who,
              by_value(all, &Request::copy_engine, ranks));
  if (differs(all, &Request::registrations))
    fail_comm(CommErrc::Mismatch,
              "{}: the ranks differ in which earlier buffers they still hold. Try: free buffers in the same order on all ranks", who);
  std::vector<int> without;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].has_memory == 0) without.push_back(ranks[i]);
  if (!without.empty())
    fail_comm(CommErrc::Backend, "{}: no {} bytes of memory are left on rank {}. Try: smaller units or batches", who, all.front().bytes,
              fmt::join(without, ", "));
}

}  // namespace

Allocation FrontCommunicator::plain_memory(int64_t bytes) const noexcept {
  try {
    return {c10::GetAllocator(info_.device.type())->allocate(static_cast<size_t>(bytes)), bytes, false};
  } catch (...) {  // none left: every rank is told
    return {};
  }
}

void FrontCommunicator::prepare_buffers(const OpInfo&) {
  if (rank() == 0) warn_plain_buffers(name(), "only NCCL on CUDA registers memory");
}

void FrontCommunicator::gather_numbers(std::span<int64_t> all, std::span<const int64_t> mine, const OpInfo& info) {
  issue(make_op({.kind = OpKind::AllGather, .dtype = c10::ScalarType::Long, .count = std::ssize(mine)}, all.data(), mine.data(), info), {})
      .wait_host();
}

Allocation FrontCommunicator::allocate(int64_t bytes, const OpInfo& info) {
  failure_->check();
  const auto who = fmt::format("allocate '{}' on communicator '{}'", info.label, name());
  FSDPP_ENFORCE(bytes > 0, UsageError, "{}: expected 1 byte or more, got {}", who, bytes);
  FSDPP_ENFORCE(!in_group_, UsageError, "{}: inside a group. Try: allocate before group_begin", who);
  FSDPP_ENFORCE(!cuda::current_stream(device()).is_capturing(), UsageError,
                "{}: {} bytes would be registered inside a stream capture. Try: take the step once without capture first", who, bytes);
  Requests all(static_cast<size_t>(size()));
  Allocation memory;
  if (size() == 1) {
    memory = plain_memory(bytes);
    all[0] = {bytes, 0, 0, memory.data ? 1 : 0};
    check_agreement(who, all, info_.ranks);
    return memory;
  }
  const auto label = fmt::format("allocate {}", info.label);
  const OpInfo exchange{label, info.timeout};
  prepare_buffers(exchange);
  memory = reserve(bytes);
  const std::array<int64_t, 4> mine{bytes, registrations(), info_.options.copy_engine ? 1 : 0, memory.data ? 1 : 0};
  static_assert(sizeof(Request) == sizeof mine);
  gather_numbers({&all.front().bytes, all.size() * mine.size()}, mine, exchange);
  check_agreement(who, all, info_.ranks);
  enlist(memory);
  return memory;
}

}  // namespace fsdpp::comm

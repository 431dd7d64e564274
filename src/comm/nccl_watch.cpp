// What the watchdog does with an NCCL communicator: look at its state, and say what is wrong.
#include "base/enforce.h"
#include "comm/nccl_api.h"
#include "comm/nccl_core.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kObservation = std::chrono::milliseconds(1700);  // several heartbeats
constexpr double kSilent = 1.5;                                 // seconds

void append(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }

/// Members sorted by how far they are with one operation.
struct HangClasses {
  std::string dead, left, mismatched, never_issued, not_started, started, done;

  [[nodiscard]] std::string text() const {
    std::string result;
    auto add = [&](const char* what, const std::string& who) {
      if (!who.empty()) result += fmt::format("\n  {}: {}", what, who);
    };
    add("dead", dead);
    add("ended in good order", left);
    add("issued something else", mismatched);
    add("never issued by", never_issued);
    add("issued but not started on (the stream waits for earlier work there)", not_started);
    add("started on", started);
    add("complete on", done);
    return result;
  }
  [[nodiscard]] CommErrc code() const {
    if (!dead.empty() || !left.empty()) return CommErrc::RemoteDied;
    return mismatched.empty() ? CommErrc::Timeout : CommErrc::Mismatch;
  }
};

void classify(HangClasses& classes, const Peer& peer, const std::string& key, const Op& op, int rank) {
  const auto name = fmt::format("rank {}", rank);
  if (peer.life == Peer::Life::Dead)
    return append(classes.dead, fmt::format("{} (no heartbeat for {:.1f} s)", name, peer.age_s));
  if (peer.life == Peer::Life::Left) return append(classes.left, name);
  const auto it = peer.communicators.find(key);
  if (it == peer.communicators.end()) return append(classes.never_issued, name);
  const Progress& progress = it->second;
  if (progress.issued <= op.sequence)
    return append(classes.never_issued,
                  progress.last_issued.empty() ? name : fmt::format("{} (last issued {})", name, progress.last_issued));
  const std::string mine = describe(op.sig, op.label);
  const std::string& theirs = progress.oldest == op.sequence       ? progress.oldest_text
                              : progress.issued == op.sequence + 1 ? progress.last_text
                                                                   : mine;  // not known any more
  if (theirs != mine) return append(classes.mismatched, fmt::format("{} ({}, but here {})", name, theirs, mine));
  if (progress.oldest > op.sequence) return append(classes.done, name);
  append(progress.oldest == op.sequence && progress.oldest_started ? classes.started : classes.not_started, name);
}

}  // namespace

std::shared_ptr<NcclRecord> NcclCore::oldest_pending() {
  std::lock_guard lock(mutex_);
  while (!pending_.empty() && pending_.front()->issued.load(std::memory_order_acquire) && pending_.front()->end.query())
    pending_.pop_front();
  return pending_.empty() ? nullptr : pending_.front();
}

void NcclCore::poll(Watchdog& dog) {
  try {
    if (failure_->failed()) return dog.report(failure_->code(), failure_->text());
    const bool sick = poll_async_error(dog);
    const auto record = oldest_pending();
    const bool slow = record && poll_time(dog, *record);
    if (!sick && !slow) suspicion_ = {};
  } catch (const CudaError& error) {
    dog.report(CommErrc::Backend, fmt::format("communicator '{}': rank {}'s device failed: {}", name_,
                                              ranks_[static_cast<size_t>(rank_)], error.what()));
  }
}

bool NcclCore::poll_async_error(Watchdog& dog) {
  ncclResult_t result = ncclSuccess;
  {
    std::lock_guard lock(handle_mutex_);
    if (handle_ == nullptr || ncclCommGetAsyncError(handle_, &result) != ncclSuccess) return false;
  }
  if (result == ncclSuccess || result == ncclInProgress) return false;
  if (!observed_long_enough(dog)) return true;
  const std::string silent = silent_ranks(dog);
  const auto record = oldest_pending();
  dog.report(silent.empty() ? CommErrc::Backend : CommErrc::RemoteDied,
             fmt::format("communicator '{}': {}{}; as seen by rank {}{}", name_, record ? record->text() + ": " : "",
                         nccl_text("NCCL", result), ranks_[static_cast<size_t>(rank_)],
                         silent.empty() ? "" : fmt::format("; without a sign of life: {}", silent)));
  return true;
}

bool NcclCore::poll_time(Watchdog& dog, NcclRecord& record) {
  const auto now = Clock::now();
  const bool issued = record.issued.load(std::memory_order_acquire);
  if (issued && record.started == Clock::time_point{} && record.start.query()) record.started = now;
  if (issued && record.started == Clock::time_point{})
    return false;  // the stream is busy with earlier work: no time-out for that
  const auto since = issued ? record.started : record.called;
  if (now - since <= record.op.timeout) return false;
  if (observed_long_enough(dog)) report_hang(dog, record, std::chrono::duration<double>(now - since).count());
  return true;
}

// Looks at the members' heartbeats over a while before anybody is accused; this rank's own goes on in the meantime.
bool NcclCore::observed_long_enough(Watchdog& dog) {
  if (suspicion_ == Clock::time_point{}) {
    suspicion_ = Clock::now();
    for (const int rank : ranks_) (void)dog.peer(rank);
  }
  return Clock::now() - suspicion_ > kObservation;
}

Progress NcclCore::progress() const {
  std::lock_guard lock(mutex_);
  Progress result;
  result.issued = result.oldest = issued_;
  if (issued_ == 0) return result;
  result.last_issued = short_name(last_);
  result.last_text = describe(last_.sig, last_.label);
  if (pending_.empty()) return result;
  const NcclRecord& oldest = *pending_.front();
  result.oldest = oldest.op.sequence;
  result.oldest_text = describe(oldest.op.sig, oldest.op.label);
  result.oldest_started = oldest.started != Clock::time_point{};
  return result;
}

// Ranks whose heartbeat stands still over a few beats.
std::string NcclCore::silent_ranks(Watchdog& dog) const {
  std::string silent;
  for (const int rank : ranks_)
    if (rank != ranks_[static_cast<size_t>(rank_)] && dog.peer(rank).age_s > kSilent)
      append(silent, fmt::format("rank {}", rank));
  return silent;
}

void NcclCore::report_hang(Watchdog& dog, const NcclRecord& record, double waited) {
  const std::string silent = silent_ranks(dog);
  HangClasses classes;
  for (const int rank : ranks_) {
    if (rank == ranks_[static_cast<size_t>(rank_)]) {
      append(record.issued ? classes.started : classes.not_started, fmt::format("rank {}", rank));
      continue;
    }
    Peer peer = dog.peer(rank);
    if (peer.life == Peer::Life::Alive && peer.age_s > kSilent) peer.life = Peer::Life::Dead;
    classify(classes, peer, key_, record.op, rank);
  }
  dog.report(classes.code(), fmt::format("communicator '{}': {} made no progress for {:.1f} s{}", name_, record.text(),
                                         waited, classes.text()));
}

}  // namespace fsdpp::comm

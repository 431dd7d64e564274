#include "comm/local_hub.h"

#include <fmt/format.h>

#include <algorithm>

namespace fsdpp::comm {

LocalHub::LocalHub(std::string name, std::vector<int> world_ranks)
    : name_(std::move(name)), world_ranks_(std::move(world_ranks)), members_(world_ranks_.size()) {}

void LocalHub::post(int rank, Op op, bool drop) {
  std::unique_lock lock(mutex_);
  throw_if_failed(lock);
  Entry& e = entry(op);
  if (drop) return;
  auto index = static_cast<size_t>(rank);
  members_[index].last_issued = short_name(op);
  e.ops[index] = std::move(op);
  ++e.arrived;
  check_agreement(e, rank);
  check_left();
  run_ready(lock);
  throw_if_failed(lock);
}

LocalHub::Entry& LocalHub::entry(const Op& op) {
  while (entries_.size() <= op.sequence - executed_) entries_.emplace_back();
  Entry& e = entries_[op.sequence - executed_];
  if (e.ops.empty()) {
    e.ops.resize(members_.size());
    e.since = Clock::now();
    e.timeout = op.timeout;
  }
  return e;
}

void LocalHub::check_agreement(const Entry& e, int rank) {
  const Op& mine = *e.ops[static_cast<size_t>(rank)];
  for (size_t r = 0; r < e.ops.size(); ++r) {
    if (!e.ops[r]) continue;
    const Op& other = *e.ops[r];
    if (other.sig == mine.sig && labels_agree(other.label, mine.label)) continue;
    return fail_locked(CommErrc::Mismatch,
                       mismatch_text(name_, mine.sequence, world_ranks_[r], describe(other.sig, other.label),
                                     world_ranks_[static_cast<size_t>(rank)], describe(mine.sig, mine.label)));
  }
}

void LocalHub::run_ready(std::unique_lock<std::mutex>& lock) {
  while (!executing_ && !failure_.failed() && !entries_.empty() && entries_.front().arrived == members_.size()) {
    executing_ = true;
    Entry e = std::move(entries_.front());
    lock.unlock();
    execute_local(e.ops);
    lock.lock();
    entries_.pop_front();
    ++executed_;
    executing_ = false;
    last_done_ = Clock::now();
    changed_.notify_all();
  }
}

bool LocalHub::done(uint64_t sequence) {
  std::unique_lock lock(mutex_);
  if (executed_ > sequence) return true;
  check_left();
  check_deadline();
  if (failure_.failed() && !executing_) failure_.check();
  return false;
}

void LocalHub::wait(uint64_t sequence) {
  std::unique_lock lock(mutex_);
  while (executed_ <= sequence) {
    if (entries_.size() <= sequence - executed_) return;  // never posted
    check_left();
    check_deadline();
    throw_if_failed(lock);
    const auto& front = entries_.front();
    if (executing_ || front.ops.empty()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, std::max(front.since, last_done_) + front.timeout);
    }
  }
}

std::string LocalHub::waiting_for(const Entry& e, bool only_left) const {
  std::string text;
  for (size_t r = 0; r < e.ops.size(); ++r) {
    if (e.ops[r] || (only_left && !members_[r].left)) continue;
    const auto& last = members_[r].last_issued;
    text += fmt::format("{}rank {} ({})", text.empty() ? "" : ", ", world_ranks_[r],
                        last.empty() ? "issued nothing yet" : "last issued " + last);
  }
  return text;
}

void LocalHub::check_left() {
  if (executing_ || entries_.empty()) return;
  const Entry& e = entries_.front();
  if (e.arrived == 0 || e.arrived == members_.size()) return;
  const std::string gone = waiting_for(e, true);
  if (gone.empty()) return;
  const auto it = std::find_if(e.ops.begin(), e.ops.end(), [](const auto& op) { return op.has_value(); });
  fail_locked(CommErrc::RemoteDied,
              fmt::format("communicator '{}': {} waits for a rank that has ended: {}", name_, short_name(**it), gone));
}

void LocalHub::check_deadline() {
  if (executing_ || entries_.empty() || entries_.front().ops.empty()) return;
  const Entry& e = entries_.front();
  if (Clock::now() < std::max(e.since, last_done_) + e.timeout) return;
  const auto it = std::find_if(e.ops.begin(), e.ops.end(), [](const auto& op) { return op.has_value(); });
  const std::string what = it == e.ops.end() ? fmt::format("operation #{}", executed_) : short_name(**it);
  fail_locked(CommErrc::Timeout,
              fmt::format("communicator '{}': {} made no progress for {} s: never issued by {}", name_, what,
                          static_cast<double>(e.timeout.count()) / 1e3, waiting_for(e, false)));
}

void LocalHub::leave(int rank) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !executing_; });
  members_[static_cast<size_t>(rank)].left = true;
  for (const Entry& e : entries_) {
    if (e.ops.empty() || !e.ops[static_cast<size_t>(rank)]) continue;
    fail_locked(CommErrc::RemoteDied,
                fmt::format("communicator '{}': rank {} has ended while its {} was pending", name_,
                            world_ranks_[static_cast<size_t>(rank)], short_name(*e.ops[static_cast<size_t>(rank)])));
    break;
  }
  changed_.notify_all();
}

void LocalHub::fail(CommErrc code, const std::string& text) noexcept {
  std::unique_lock lock(mutex_);
  fail_locked(code, text);
  changed_.wait(lock, [&] { return !executing_; });
}

void LocalHub::fail_locked(CommErrc code, const std::string& text) noexcept {
  failure_.set(code, text);
  changed_.notify_all();
}

void LocalHub::throw_if_failed(std::unique_lock<std::mutex>& lock) {
  if (!failure_.failed()) return;
  changed_.wait(lock, [&] { return !executing_; });
  failure_.check();
}

}  // namespace fsdpp::comm

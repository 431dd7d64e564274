#include "comm/watchdog.h"

#include <charconv>

#include "base/enforce.h"
#include "comm/thread_mode.h"
#include "fsdpp/base/log.h"

namespace fsdpp::comm {
namespace {

constexpr char kField = '\x1f';
constexpr char kRecord = '\x1e';
constexpr const char* kLeft = "left";

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

std::optional<uint64_t> number(const std::string& text) {
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string beat_key(int rank) { return fmt::format("heartbeat/{}", rank); }

}  // namespace

std::string Progress::encode() const {
  return fmt::format("{1}{0}{2}{0}{3}{0}{4}{0}{5}{0}{6}", kField, issued, last_issued, last_text, oldest, oldest_text,
                     oldest_started ? 1 : 0);
}

std::optional<Progress> Progress::decode(const std::string& text) {
  const auto parts = split(text, kField);
  if (parts.size() != 6) return std::nullopt;
  const auto issued = number(parts[0]), oldest = number(parts[3]);
  if (!issued || !oldest) return std::nullopt;
  return Progress{*issued, parts[1], parts[2], *oldest, parts[4], parts[5] == "1"};
}

Watchdog::Watchdog(std::shared_ptr<Store> store, int rank, int size, Options options)
    : store_(std::move(store)), rank_(rank), size_(size), options_(options), thread_([this] { loop(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  try {
    store_->set(beat_key(rank_), kLeft);
  } catch (...) {  // the store went first
  }
}

void Watchdog::watch(std::weak_ptr<Watched> communicator) {
  std::lock_guard lock(mutex_);
  watched_.push_back(std::move(communicator));
}

std::vector<std::shared_ptr<Watched>> Watchdog::living() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Watched>> result;
  std::erase_if(watched_, [&](const auto& weak) {
    auto strong = weak.lock();
    if (strong) result.push_back(std::move(strong));
    return weak.expired();
  });
  return result;
}

void Watchdog::loop() {
  const ThreadCaptureMode relaxed;  // queries of this thread must not break a graph capture of another
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    try {
      tick();
    } catch (const CommError& error) {
      store_lost(error.what());
    } catch (const std::exception& error) {
      log::warn(fmt::format("watchdog: {}", error.what()));
    }
    lock.lock();
    wake_.wait_for(lock, options_.tick, [this] { return stop_; });
  }
}

void Watchdog::tick() {
  if (failure_.failed()) return spread();
  const auto all = living();
  for (const auto& one : all) one->poll(*this);
  if (Clock::now() >= next_beat_) {
    next_beat_ = Clock::now() + options_.heartbeat;
    beat(all);
    judge_neighbour();
    look_for_failure();
  }
  if (failure_.failed()) spread();
}

void Watchdog::beat(const std::vector<std::shared_ptr<Watched>>& all) {
  std::string value = std::to_string(++beats_);
  for (const auto& one : all) value += fmt::format("{}{}{}{}", kRecord, one->key(), kField, one->progress().encode());
  store_->set(beat_key(rank_), value);
}

Peer Watchdog::peer(int rank) {
  Peer peer;
  const auto value = store_->try_get(beat_key(rank));
  auto& seen = seen_.try_emplace(rank, "", Clock::now()).first->second;  // one may end before its first
  if (value && seen.value != *value) seen = {*value, Clock::now()};
  peer.age_s = std::chrono::duration<double>(Clock::now() - seen.since).count();
  if (value) peer.life = *value == kLeft ? Peer::Life::Left : Peer::Life::Alive;
  if (peer.life != Peer::Life::Left && options_.dead_after.count() > 0 && Clock::now() - seen.since > options_.dead_after)
    peer.life = Peer::Life::Dead;
  if (!value) return peer;
  const auto records = split(*value, kRecord);
  for (size_t i = 1; i < records.size(); ++i) {
    const size_t cut = records[i].find(kField);
    if (cut == std::string::npos) continue;
    if (auto progress = Progress::decode(records[i].substr(cut + 1)))
      peer.communicators[records[i].substr(0, cut)] = *progress;
  }
  return peer;
}

void Watchdog::judge_neighbour() {
  if (size_ < 2) return;
  const int next = (rank_ + 1) % size_;
  const Peer neighbour = peer(next);
  if (neighbour.life != Peer::Life::Dead) return;
  report(CommErrc::RemoteDied,
         fmt::format("rank {} has given no sign of life for {:.1f} s (its heartbeat in the store stopped); rank {} "
                     "watches it. Try: look at that rank's log and host",
                     next, neighbour.age_s, rank_));
}

void Watchdog::report(CommErrc code, const std::string& text) noexcept {
  try {
    if (store_->add("failure/claims", 1) == 1) {
      store_->set("failure/message", fmt::format("{}{}{}", static_cast<int>(code), kField, text));
      failure_.set(code, text);
      return;
    }
    for (int i = 0; i < 20 && !failure_.failed(); ++i) {
      look_for_failure();
      if (!failure_.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  } catch (...) {  // no store, then without the others
  }
  failure_.set(code, text);
}

void Watchdog::look_for_failure() {
  const auto message = store_->try_get("failure/message");
  if (!message) return;
  const size_t cut = message->find(kField);
  if (cut == std::string::npos) return;
  const auto code = number(message->substr(0, cut));
  failure_.set(code ? static_cast<CommErrc>(*code) : CommErrc::Backend, message->substr(cut + 1));
}

void Watchdog::store_lost(const std::string& text) {
  const std::string prefix = rank_prefix();  // comes again when the failure is thrown
  failure_.set(CommErrc::RemoteDied, text.starts_with(prefix) ? text.substr(prefix.size()) : text);
  spread();
}

void Watchdog::spread() {
  std::vector<std::thread> threads;  // in parallel: an abort may have to wait for its device
  for (const auto& one : living()) threads.emplace_back([this, one] { one->fail(failure_.code(), failure_.text()); });
  for (auto& thread : threads) thread.join();
}

}  // namespace fsdpp::comm

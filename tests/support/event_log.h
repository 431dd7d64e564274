#pragma once
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdpp/comm/world.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::test {

/// What the engine did on this thread, in order: "unshard block0" when a gather is issued, "reshard block0" when the memory is given
/// back, "post_backward block0" when a unit's gradients are handed on, and, if asked for, each collective as
/// "all_gather block0" when it is issued (but for comparisons between ranks) and each span of a unit's hooks. The root unit's name is empty.
///
/// One for each rank thread; it listens from construction to destruction. With a world of processes (second constructor) it hears the
/// whole process, since a backward on a GPU runs on a thread of its own.
class EventLog final : public trace::Listener {
 public:
  enum class What { Units, UnitsAndCollectives, Collectives, Hooks };
  explicit EventLog(What what = What::Units) : what_(what) { trace::set_listener(this, for_this_thread_); }
  EventLog(What what, const comm::World& world) : what_(what), for_this_thread_(world.launcher() == "threads") {
    trace::set_listener(this, for_this_thread_);
  }
  ~EventLog() override { trace::set_listener(nullptr, for_this_thread_); }
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void begin(const trace::Event& e) noexcept override {
    if (what_ == What::Hooks) return add(hook('+', e), e.name);
    if (what_ == What::Collectives) return;
    if (e.kind == trace::Kind::Unshard) add("unshard", e.name);
    if (e.kind == trace::Kind::Reshard) add("reshard", e.name);
  }
  void end(const trace::Event& e) noexcept override {
    if (what_ == What::Hooks) return add(hook('-', e), e.name);
    if (what_ != What::Collectives && e.kind == trace::Kind::PostBackward) add("post_backward", e.name);
  }
  void begin(const trace::CollectiveEvent& e) noexcept override {
    if (what_ != What::Units && what_ != What::Hooks && e.sequence >= 0 && !is_check(e.label)) add(std::string(e.op), e.label);
  }

  /// Comparisons between ranks, which the engine makes for itself.
  static bool is_check(std::string_view label) { return label == "model check" || label == "step check" || label == "largest values"; }

  /// The events so far; the log is empty afterwards.
  [[nodiscard]] std::vector<std::string> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(seen_, {});
  }
  /// The same without those that begin with one of `prefixes`.
  [[nodiscard]] std::vector<std::string> take_without(std::initializer_list<const char*> prefixes) {
    auto all = take();
    for (const std::string prefix : prefixes) std::erase_if(all, [&](auto& e) { return e.starts_with(prefix); });
    return all;
  }
  [[nodiscard]] const std::vector<std::string>& seen() const noexcept { return seen_; }

 private:
  static std::string hook(char sign, const trace::Event& e) { return std::string(1, sign).append(trace::name_of(e.kind)); }
  void add(std::string what, std::string_view name) noexcept {
    if (!name.empty()) what.append(" ").append(name);
    std::lock_guard lock(mutex_);
    seen_.push_back(std::move(what));
  }

  What what_;
  bool for_this_thread_ = true;
  std::mutex mutex_;
  std::vector<std::string> seen_;
};

/// How many of `events` begin with `prefix`.
[[nodiscard]] inline int64_t count_events(const std::vector<std::string>& events, const std::string& prefix) {
  int64_t n = 0;
  for (auto& e : events) n += e.starts_with(prefix) ? 1 : 0;
  return n;
}

}  // namespace fsdpp::test

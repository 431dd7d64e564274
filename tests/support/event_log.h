#pragma once
#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/comm/world.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::test {

/// Writes down what the engine does on this rank while it lives, in order:
///   scopes as "Unshard block0", "PostBackward block0" … (a unit without a name: "root");
///   collectives as "all_gather block0", "reduce_scatter root" … when `collectives` is on.
/// Ranks as threads: the calling thread's events only. Processes: the whole process (CUDA's backward has a thread of its own).
class EventLog final : public trace::Listener {
 public:
  using Kinds = std::set<trace::Kind>;
  inline static const Kinds kUnits = {trace::Kind::Unshard, trace::Kind::Reshard, trace::Kind::PostBackward, trace::Kind::Reduce};

  explicit EventLog(const comm::World& world, Kinds kinds = kUnits, bool collectives = false)
      : kinds_(std::move(kinds)), collectives_(collectives), for_this_thread_(world.launcher() == "threads") {
    trace::set_listener(this, for_this_thread_);
  }
  ~EventLog() override { trace::set_listener(nullptr, for_this_thread_); }

  void begin(const trace::Event& event) noexcept override {
    if (kinds_.count(event.kind)) note(std::string(trace::name_of(event.kind)) + " " + unit_name(event.name));
  }
  void end(const trace::Event&) noexcept override {}
  void begin(const trace::CollectiveEvent& event) noexcept override {
    std::lock_guard lock(mutex_);
    if (event.op != "group") ops_.emplace_back(event.op, event.label);
    if (collectives_ && event.op != "group") lines_.push_back(std::string(event.op) + " " + unit_name(event.label));
  }

  /// What was written since the last take().
  [[nodiscard]] std::vector<std::string> take() {
    std::lock_guard lock(mutex_);
    ops_.clear();
    return std::exchange(lines_, {});
  }
  /// Collectives of kind `op` ("all_gather"; "": any) that went on the wire since the last take(), but for the comparison of the model.
  [[nodiscard]] int64_t count(std::string_view op) const {
    std::lock_guard lock(mutex_);
    return std::count_if(ops_.begin(), ops_.end(), [&](auto& o) { return (op.empty() || o.first == op) && o.second != "model check"; });
  }

 private:
  static std::string unit_name(std::string_view name) { return name.empty() || name.starts_with("root unit") ? "root" : std::string(name); }
  void note(std::string line) {
    std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
  }

  Kinds kinds_;
  bool collectives_, for_this_thread_;
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
  std::vector<std::pair<std::string, std::string>> ops_;  // op, label
};

}  // namespace fsdpp::test

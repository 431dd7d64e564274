#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdpp/profiler/records.h"
#include "profiler/json_text.h"

namespace fsdpp::profiler {

/// Where the JSON goes, in pieces.
using Sink = std::function<void(std::string_view)>;

/// What the events of a file have in common.
struct ChromeFile {
  explicit ChromeFile(Sink sink) : sink(std::move(sink)) {}

  Sink sink;
  std::string text;      ///< not yet in the sink
  int64_t base_ns = 0;   ///< ts 0
  bool merged = false;   ///< several ranks: processes are numbered by rank
  bool first = true;
  int64_t replaced_names = 0;
  int64_t untimed = 0;          ///< records without times, left out
  int64_t omitted_arrows = 0;   ///< work that seems to start before its launch

  void flush(size_t above = 0) {
    if (text.size() <= above) return;
    sink(text);
    text.clear();
  }
};

/// Events on a row of their own where they would overlap.
class Lanes {
 public:
  /// The lane of [start, end): 0 unless it is taken. Starts must not decrease for a key.
  int place(std::pair<int64_t, int64_t> key, int64_t start, int64_t end) {
    auto& ends = ends_[key];
    size_t lane = 0;
    while (lane < ends.size() && ends[lane] > start) ++lane;
    if (lane == ends.size()) ends.push_back(0);
    ends[lane] = end;
    return static_cast<int>(lane);
  }

 private:
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> ends_;
};

/// Where a collective is drawn; arrows join the ranks'.
struct Anchor {
  int64_t pid = 0, tid = 0, time_ns = 0;
};

/// Writes the events of one rank.
class RankEvents {
 public:
  RankEvents(const Trace& trace, ChromeFile& file);
  void write();
  /// By (comm, sequence).
  [[nodiscard]] const std::map<std::pair<std::string, int64_t>, Anchor>& anchors() const noexcept { return anchors_; }

 private:
  using Args = std::function<void(JsonObject&)>;

  void complete(std::string_view category, std::string_view name, int64_t pid, int64_t tid, int64_t start, int64_t end, const Args& args);
  void instant(const MemoryEvent& event);
  void arrow(char phase, std::string_view category, int64_t id, int64_t pid, int64_t tid, int64_t time);
  void meta(std::string_view what, int64_t pid, int64_t tid, const Args& args);

  void ops();
  void scopes();
  void units();
  void steps();
  void runtime();
  void device_work();
  void kernel(const Kernel& kernel, int64_t tid);
  void copy(const Copy& copy, int64_t tid);
  void syncs();
  void overheads();
  void collectives();
  void launch_arrows();
  void backward_arrows();
  void names();
  void process_name(int64_t pid, const std::string& name, const std::string& label, int64_t order);

  [[nodiscard]] int64_t gpu(int device) const { return file_.merged ? trace_.rank * int64_t{1000} + device : device; }
  [[nodiscard]] int64_t device_row(int64_t pid, int64_t stream, int64_t start, int64_t end);
  [[nodiscard]] const Collective* collective_of(int kernel) const;
  [[nodiscard]] uint64_t op_id(int op) const { return op >= 0 ? trace_.cpu_ops[op].id : 0; }

  const Trace& trace_;
  ChromeFile& file_;
  int64_t cpu_;
  Lanes lanes_;
  std::set<std::pair<int64_t, int64_t>> threads_;  // pid, tid that have events
  std::map<std::pair<int64_t, int64_t>, std::string> row_names_;
  std::map<int, const Collective*> by_kernel_;
  std::map<int64_t, Anchor> first_work_;  // correlation: the device work that an arrow points to
  std::map<std::pair<std::string, int64_t>, Anchor> anchors_;
};

/// `text` as JSON if it is a list of lists, numbers and 'quoted' words, else as a string.
bool append_list(std::string& out, std::string_view text);

}  // namespace fsdpp::profiler

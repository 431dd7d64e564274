#include "profiler/chrome_writer.h"

#include "fsdpp/profiler/analysis.h"

namespace fsdpp::profiler {
namespace {

class ListReader {
 public:
  ListReader(std::string_view text, std::string& out) : text_(text), out_(out) {}

  bool whole() { return list(0) && at_ == text_.size(); }

 private:
  bool eat(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool list(int depth) {
    if (depth > 8 || !eat('[')) return false;
    out_ += '[';
    for (bool first = true; !eat(']'); first = false) {
      if (!first) {
        if (!eat(',')) return false;
        out_ += ',';
      }
      eat(' ');
      if (!(list(depth + 1) || word() || number())) return false;
    }
    out_ += ']';
    return true;
  }
  bool word() {
    if (!eat('\'')) return false;
    const size_t end = text_.find('\'', at_);
    if (end == text_.npos) return false;
    append_json_string(out_, text_.substr(at_, end - at_));
    at_ = end + 1;
    return true;
  }
  bool number() {
    const size_t start = at_;
    eat('-');
    const size_t digits = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    if (at_ == digits || (at_ - digits > 1 && text_[digits] == '0')) return false;
    out_ += text_.substr(start, at_ - start);
    return true;
  }

  std::string_view text_;
  std::string& out_;
  size_t at_ = 0;
};

}  // namespace

bool append_list(std::string& out, std::string_view text) {
  std::string list;
  if (!ListReader(text, list).whole()) return append_json_string(out, text);
  out += list;
  return false;
}

void RankEvents::complete(std::string_view category, std::string_view name, int64_t pid, int64_t tid, int64_t start, int64_t end,
                          const Args& args) {
  threads_.insert({pid, tid});
  file_.text += file_.first ? "\n" : ",\n";
  file_.first = false;
  {
    JsonObject event(file_.text);
    event.text("ph", "X");
    event.text("cat", category);
    event.text("name", name);
    event.number("pid", pid);
    event.number("tid", tid);
    event.us("ts", start + trace_.clock_offset_ns - file_.base_ns);
    event.us("dur", end - start);
    int64_t replaced = 0;
    if (args) {
      JsonObject object(event.key("args"));
      args(object);
      replaced = object.replaced();
    }
    file_.replaced_names += event.replaced() + replaced;
  }
  file_.flush(1 << 20);
}

void RankEvents::instant(const MemoryEvent& m) {
  threads_.insert({cpu_, m.thread});
  file_.text += file_.first ? "\n" : ",\n";
  file_.first = false;
  {
    JsonObject event(file_.text);
    event.text("ph", "i");
    event.text("cat", "cpu_instant_event");
    event.text("name", "[memory]");
    event.text("s", "t");
    event.number("pid", cpu_);
    event.number("tid", m.thread);
    event.us("ts", m.time_ns + trace_.clock_offset_ns - file_.base_ns);
    JsonObject args(event.key("args"));
    args.number("Addr", static_cast<int64_t>(m.address));
    args.number("Bytes", m.bytes);
    args.number("Total Allocated", m.total_bytes);
    args.number("Total Reserved", m.reserved_bytes);
    args.number("Device Type", m.device < 0 ? 0 : 1);
    args.number("Device Id", m.device);
    args.text("Category", to_string(m.category));
  }
  file_.flush(1 << 20);
}

void RankEvents::arrow(char phase, std::string_view category, int64_t id, int64_t pid, int64_t tid, int64_t time) {
  file_.text += file_.first ? "\n" : ",\n";
  file_.first = false;
  JsonObject event(file_.text);
  event.text("ph", std::string_view(&phase, 1));
  event.number("id", id);
  event.number("pid", pid);
  event.number("tid", tid);
  event.us("ts", time + trace_.clock_offset_ns - file_.base_ns);
  event.text("cat", category);
  event.text("name", category);
  if (phase == 'f') event.text("bp", "e");
}

void RankEvents::meta(std::string_view what, int64_t pid, int64_t tid, const Args& args) {
  file_.text += file_.first ? "\n" : ",\n";
  file_.first = false;
  JsonObject event(file_.text);
  event.text("ph", "M");
  event.text("name", what);
  event.number("pid", pid);
  event.number("tid", tid);
  event.us("ts", 0);
  JsonObject object(event.key("args"));
  args(object);
}

void RankEvents::process_name(int64_t pid, const std::string& name, const std::string& label, int64_t order) {
  meta("process_name", pid, 0, [&](JsonObject& args) { args.text("name", name); });
  meta("process_labels", pid, 0, [&](JsonObject& args) { args.text("labels", label); });
  meta("process_sort_index", pid, 0, [&](JsonObject& args) { args.number("sort_index", order); });
}

void RankEvents::names() {
  const std::string rank = "rank " + std::to_string(trace_.rank);
  const int64_t order = trace_.rank * int64_t{1000};
  std::set<int64_t> processes{cpu_};
  for (const auto& [pid, tid] : threads_) processes.insert(pid);
  for (const int64_t pid : processes) {
    if (pid == cpu_)
      process_name(pid, rank + " on " + (trace_.host.empty() ? "this host" : trace_.host), "CPU", order);
    else if (pid == cpu_ - 1 || pid < 0)
      process_name(pid, rank + " overhead", "overhead", order + 900);
    else
      process_name(pid, rank, "GPU " + std::to_string(pid % 1000), order + 1 + pid % 1000);
  }
  for (const auto& [pid, tid] : threads_) {
    const auto known = row_names_.find({pid, tid});
    const std::string name = known == row_names_.end() ? "thread " + std::to_string(tid) : known->second;
    meta("thread_name", pid, tid, [&, tid = tid](JsonObject& args) { args.text("name", name); });
    meta("thread_sort_index", pid, tid, [&, tid = tid](JsonObject& args) { args.number("sort_index", tid); });
  }
}

}  // namespace fsdpp::profiler

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "base/enforce.h"
#include "fsdpp/profiler/table.h"
#include "profiler/json_text.h"

namespace fsdpp::profiler {
namespace {

using Value = double (*)(const Average&);
struct SortKey {
  std::string_view name;
  Value value;
};

double per_call(int64_t ns, const Average& a) { return a.count == 0 ? 0 : static_cast<double>(ns) / static_cast<double>(a.count); }

constexpr std::array kSortKeys{
    SortKey{"cpu_time_total", [](const Average& a) { return double(a.cpu_total_ns); }},
    SortKey{"self_cpu_time_total", [](const Average& a) { return double(a.cpu_self_ns); }},
    SortKey{"cpu_time", [](const Average& a) { return per_call(a.cpu_total_ns, a); }},
    SortKey{"cuda_time_total", [](const Average& a) { return double(a.cuda_total_ns); }},
    SortKey{"self_cuda_time_total", [](const Average& a) { return double(a.cuda_self_ns); }},
    SortKey{"cuda_time", [](const Average& a) { return per_call(a.cuda_total_ns, a); }},
    SortKey{"cpu_memory_usage", [](const Average& a) { return double(a.cpu_memory); }},
    SortKey{"self_cpu_memory_usage", [](const Average& a) { return double(a.cpu_self_memory); }},
    SortKey{"cuda_memory_usage", [](const Average& a) { return double(a.cuda_memory); }},
    SortKey{"self_cuda_memory_usage", [](const Average& a) { return double(a.cuda_self_memory); }},
    SortKey{"count", [](const Average& a) { return double(a.count); }},
    SortKey{"flops", [](const Average& a) { return a.flops; }},
};

Value find_key(std::string_view wanted) {
  std::string name(wanted);
  if (const size_t at = name.find("device"); at != name.npos) name.replace(at, 6, "cuda");
  const auto* found = std::find_if(kSortKeys.begin(), kSortKeys.end(), [&](const SortKey& key) { return key.name == name; });
  if (found != kSortKeys.end()) return found->value;
  std::string known = "name";
  for (const SortKey& key : kSortKeys) known += ", " + std::string(key.name);
  fail<ConfigError>("profiler table: expected sort_by to be one of {}; got '{}'", known, wanted);
}

std::string time_text(double ns) {
  const double us = ns / 1e3;
  if (us >= 1e6) return fmt::format("{:.3f}s", us / 1e6);
  if (us >= 1e3) return fmt::format("{:.3f}ms", us / 1e3);
  return fmt::format("{:.3f}us", us);
}

std::string share_text(int64_t part, int64_t total) {
  if (total == 0) return part == 0 ? "0.00%" : "NaN";
  return fmt::format("{:.2f}%", 100.0 * static_cast<double>(part) / static_cast<double>(total));
}

std::string memory_text(int64_t bytes) {
  const auto size = static_cast<double>(bytes);
  for (const auto& [unit, name] : {std::pair{1e9, "GB"}, {1e6, "MB"}, {1e3, "KB"}}) {
    const double binary = unit == 1e9 ? 1073741824.0 : unit == 1e6 ? 1048576.0 : 1024.0;
    if (std::abs(size) >= binary) return fmt::format("{:.2f} {}", size / binary, name);
  }
  return fmt::format("{} B", bytes);
}

struct Column {
  std::string title;
  size_t width;
  std::function<std::string(const Average&)> text;
};

/// The unit of all rows' flops follows the smallest.
Column flops_column(const std::vector<Average>& rows) {
  double smallest = INFINITY;
  for (const Average& row : rows)
    if (row.flops > 0) smallest = std::min(smallest, row.flops);
  static constexpr std::array kNames{"FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"};
  const auto power = std::clamp(static_cast<int>(std::floor(std::log10(smallest) / 3)), 0, static_cast<int>(kNames.size()) - 1);
  const double scale = std::pow(1000.0, power);
  return {fmt::format("Total {}", kNames[static_cast<size_t>(power)]), 12,
          [scale](const Average& a) { return a.flops > 0 ? fmt::format("{:.3f}", a.flops / scale) : std::string("--"); }};
}

std::string cut(std::string text, size_t width) {
  // Not inside a UTF-8 character.
  if (text.size() <= width - 4) return text;
  size_t at = width - 3;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return text.substr(0, at) + "...";
}

std::string one_line(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  return text;
}

size_t width_of(const std::vector<Average>& rows, std::string Average::* member, size_t least, size_t most) {
  size_t longest = 0;
  for (const Average& row : rows) longest = std::max(longest, (row.*member).size());
  return std::clamp(longest + 4, least, most);
}

std::string csv_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

}  // namespace

std::vector<Average> KeyAverages::sorted(std::string_view sort_by) const {
  std::vector<Average> rows = rows_;
  if (sort_by.empty()) return rows;
  const Value value = sort_by == "name" ? nullptr : find_key(sort_by);
  std::stable_sort(rows.begin(), rows.end(), [value](const Average& a, const Average& b) {
    if (value && value(a) != value(b)) return value(a) > value(b);
    return a.name < b.name;
  });
  return rows;
}

std::string KeyAverages::table(std::string_view sort_by, int64_t row_limit) const {
  const std::vector<Average> rows = sorted(sort_by);
  std::vector<Column> columns;
  const size_t name_width = width_of(rows, &Average::name, 8, 55);
  const auto add = [&](const char* title, auto text) { columns.push_back({title, 12, text}); };
  columns.push_back({"Name", name_width, [=](const Average& a) { return cut(one_line(a.name), name_width); }});
  add("Self CPU %", [this](const Average& a) { return share_text(a.cpu_self_ns, cpu_time_ns_); });
  add("Self CPU", [](const Average& a) { return time_text(double(a.cpu_self_ns)); });
  add("CPU total %", [this](const Average& a) { return share_text(a.cpu_total_ns, cpu_time_ns_); });
  add("CPU total", [](const Average& a) { return time_text(double(a.cpu_total_ns)); });
  add("CPU time avg", [](const Average& a) { return time_text(per_call(a.cpu_total_ns, a)); });
  if (cuda_time_ns_ > 0) {
    add("Self CUDA", [](const Average& a) { return time_text(double(a.cuda_self_ns)); });
    add("Self CUDA %", [this](const Average& a) { return share_text(a.cuda_self_ns, cuda_time_ns_); });
    add("CUDA total", [](const Average& a) { return time_text(double(a.cuda_total_ns)); });
    add("CUDA time avg", [](const Average& a) { return time_text(per_call(a.cuda_total_ns, a)); });
  }
  if (memory_) {
    add("CPU Mem", [](const Average& a) { return memory_text(a.cpu_memory); });
    add("Self CPU Mem", [](const Average& a) { return memory_text(a.cpu_self_memory); });
    const bool device = std::any_of(rows.begin(), rows.end(), [](const Average& a) { return a.cuda_memory != 0 || a.cuda_self_memory != 0; });
    if (device) {
      add("CUDA Mem", [](const Average& a) { return memory_text(a.cuda_memory); });
      add("Self CUDA Mem", [](const Average& a) { return memory_text(a.cuda_self_memory); });
    }
  }
  add("# of Calls", [](const Average& a) { return std::to_string(a.count); });
  if (shapes_) {
    const size_t width = width_of(rows, &Average::shapes, 16, 80);
    columns.push_back({"Input Shapes", width, [=](const Average& a) { return a.shapes.substr(0, width); }});
  }
  if (flops_) columns.push_back(flops_column(rows));

  std::string line, out;
  for (const Column& c : columns) line += std::string(c.width, '-') + "  ";
  line += "\n";
  out = line;
  for (const Column& c : columns) out += fmt::format("{:>{}}  ", c.title, c.width);
  out += "\n" + line;
  int64_t left = row_limit < 0 ? INT64_MAX : row_limit;
  for (const Average& row : rows) {
    if (left-- == 0) break;
    for (const Column& c : columns) out += fmt::format("{:>{}}  ", c.text(row), c.width);
    out += "\n";
  }
  out += line + fmt::format("Self CPU time total: {}\n", time_text(double(cpu_time_ns_)));
  if (cuda_time_ns_ > 0) out += fmt::format("Self CUDA time total: {}\n", time_text(double(cuda_time_ns_)));
  return out;
}

std::string KeyAverages::json(std::string_view sort_by) const {
  std::string out = "[";
  for (const Average& a : sorted(sort_by)) {
    if (out.size() > 1) out += ",\n";
    JsonObject row(out);
    row.text("name", a.name);
    row.text("input_shapes", a.shapes);
    row.text("device", a.on_device ? "cuda" : "cpu");
    row.number("count", a.count);
    row.us("cpu_time_total_us", a.cpu_total_ns);
    row.us("self_cpu_time_total_us", a.cpu_self_ns);
    row.us("cuda_time_total_us", a.cuda_total_ns);
    row.us("self_cuda_time_total_us", a.cuda_self_ns);
    row.number("cpu_memory_usage", a.cpu_memory);
    row.number("self_cpu_memory_usage", a.cpu_self_memory);
    row.number("cuda_memory_usage", a.cuda_memory);
    row.number("self_cuda_memory_usage", a.cuda_self_memory);
    row.real("flops", a.flops);
  }
  return out + "]\n";
}

std::string KeyAverages::csv(std::string_view sort_by) const {
  std::string out =
      "name,input_shapes,device,count,cpu_time_total_us,self_cpu_time_total_us,cuda_time_total_us,self_cuda_time_total_us,"
      "cpu_memory_usage,self_cpu_memory_usage,cuda_memory_usage,self_cuda_memory_usage,flops\r\n";
  for (const Average& a : sorted(sort_by)) {
    out += fmt::format("{},{},{},{}", csv_text(a.name), csv_text(a.shapes), a.on_device ? "cuda" : "cpu", a.count);
    for (const int64_t ns : {a.cpu_total_ns, a.cpu_self_ns, a.cuda_total_ns, a.cuda_self_ns}) append_json_us(out += ',', ns);
    out += fmt::format(",{},{},{},{},{}\r\n", a.cpu_memory, a.cpu_self_memory, a.cuda_memory, a.cuda_self_memory, a.flops);
  }
  return out;
}

}  // namespace fsdpp::profiler

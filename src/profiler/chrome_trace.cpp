#include "fsdpp/profiler/chrome_trace.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "base/enforce.h"
#include "profiler/chrome_writer.h"
#include "profiler/out_file.h"

namespace fsdpp::profiler {
namespace {

void device_properties(std::string& out, const Trace& trace) {
  out += '[';
  for (const Device& d : trace.devices) {
    if (&d != trace.devices.data()) out += ',';
    JsonObject device(out);
    device.number("id", d.id);
    device.text("name", d.name);
    device.number("totalGlobalMem", d.memory_bytes);
    device.number("computeMajor", d.major);
    device.number("computeMinor", d.minor);
    device.number("maxThreadsPerBlock", d.max_threads_per_block);
    device.number("maxThreadsPerMultiprocessor", d.max_threads_per_sm);
    device.number("regsPerBlock", d.registers_per_block);
    device.number("warpSize", d.warp_size);
    device.number("sharedMemPerBlock", d.shared_per_block);
    device.number("numSms", d.sm_count);
    device.number("regsPerMultiprocessor", d.registers_per_sm);
    device.number("sharedMemPerMultiprocessor", d.shared_per_sm);
  }
  out += ']';
}

void string_list(std::string& out, const std::vector<std::string>& texts) {
  out += '[';
  for (const std::string& text : texts) {
    if (&text != texts.data()) out += ',';
    append_json_string(out, text);
  }
  out += ']';
}

void audit_json(std::string& out, const Trace& trace) {
  const Audit& a = trace.audit;
  JsonObject audit(out);
  audit.number("rank", trace.rank);
  for (const auto& [name, count] :
       {std::pair{"launches", a.launches}, {"graph_launches", a.graph_launches}, {"kernels", a.kernels}, {"graph_kernels", a.graph_kernels},
        {"launches_without_kernel", a.launches_without_kernel}, {"kernels_without_launch", a.kernels_without_launch},
        {"dropped_records", a.dropped_records}, {"unknown_records", a.unknown_records}, {"truncated_buffers", a.truncated_buffers},
        {"refused_buffers", a.refused_buffers}, {"zero_stamps", a.zero_stamps}, {"reversed_stamps", a.reversed_stamps},
        {"out_of_order", a.out_of_order}, {"outside_window", a.outside_window}, {"cut_by_window", a.cut_by_window},
        {"api_without_op", a.api_without_op}, {"clock_shift_ns", a.clock_shift_ns}, {"cupti_errors", a.cupti_errors}})
    audit.number(name, count);
  {
    JsonObject overhead(audit.key("overhead_ns"));
    for (const auto& [kind, ns] : a.overhead_ns) overhead.number(kind, ns);
  }
  string_list(audit.key("errors"), a.errors);
  string_list(audit.key("notes"), a.notes);
}

void metadata(JsonObject& top, const Trace& trace) {
  for (const auto& [key, value] : trace.metadata) {
    std::string& out = top.key("meta." + key);
    if (const auto* text = std::get_if<std::string>(&value))
      append_json_string(out, *text);
    else if (const auto* whole = std::get_if<int64_t>(&value))
      out += std::to_string(*whole);
    else
      append_json_number(out, std::get<double>(value));
  }
}

void header(JsonObject& top, std::span<const Trace> ranks, ChromeFile& file) {
  const Trace& first = ranks.front();
  top.number("schemaVersion", 1);
  device_properties(top.key("deviceProperties"), first);
  top.number("cupti_version", first.cupti_version);
  top.number("cuda_runtime_version", first.cuda_runtime_version);
  top.number("cuda_driver_version", first.cuda_driver_version);
  top.flag("record_shapes", first.record_shapes);
  top.flag("profile_memory", first.profile_memory);
  top.flag("with_stack", false);
  top.flag("with_flops", first.with_flops);
  {
    JsonObject info(top.key("distributedInfo"));
    info.text("backend", first.has_cuda ? "nccl" : "host");
    info.number("rank", first.rank);
    info.number("world_size", first.world_size);
  }
  std::string& audits = top.key("audit");
  audits += '[';
  for (const Trace& trace : ranks) {
    if (&trace != ranks.data()) audits += ',';
    audit_json(audits, trace);
  }
  audits += ']';
  metadata(top, first);
  top.text("displayTimeUnit", "ms");
  top.number("baseTimeNanoseconds", file.base_ns);
}

using Anchors = std::map<std::pair<std::string, int64_t>, std::vector<std::pair<size_t, Anchor>>>;

/// From the first rank that has a collective to each other.
void collective_arrows(const Anchors& anchors, std::span<const Trace> ranks, ChromeFile& file) {
  int64_t id = int64_t{1} << 51;
  const auto write = [&](char phase, const std::pair<size_t, Anchor>& at) {
    file.text += file.first ? "\n" : ",\n";
    file.first = false;
    JsonObject event(file.text);
    event.text("ph", std::string_view(&phase, 1));
    event.number("id", id);
    event.number("pid", at.second.pid);
    event.number("tid", at.second.tid);
    event.us("ts", at.second.time_ns + ranks[at.first].clock_offset_ns - file.base_ns);
    event.text("cat", "collective");
    event.text("name", "collective");
    if (phase == 'f') event.text("bp", "e");
  };
  for (const auto& [key, places] : anchors) {
    auto sorted = places;  // arrows point forward in time
    const auto time = [&](const auto& p) { return p.second.time_ns + ranks[p.first].clock_offset_ns; };
    std::stable_sort(sorted.begin(), sorted.end(), [&](const auto& a, const auto& b) { return time(a) < time(b); });
    for (size_t i = 1; i < sorted.size(); ++i, ++id) {
      write('s', sorted[0]);
      write('f', sorted[i]);
    }
  }
}

void write_all(std::span<const Trace> ranks, ChromeFile& file) {
  FSDPP_ENFORCE(!ranks.empty(), UsageError, "export_chrome_trace: expected the trace of at least one rank, got none");
  file.merged = ranks.size() > 1;
  file.base_ns = std::numeric_limits<int64_t>::max();
  for (const Trace& trace : ranks) file.base_ns = std::min(file.base_ns, trace.start_ns + trace.clock_offset_ns);
  JsonObject top(file.text);
  header(top, ranks, file);
  top.key("traceEvents") += '[';
  Anchors anchors;
  for (size_t i = 0; i < ranks.size(); ++i) {
    RankEvents events(ranks[i], file);
    events.write();
    for (const auto& [key, anchor] : events.anchors()) anchors[key].emplace_back(i, anchor);
  }
  if (file.merged) collective_arrows(anchors, ranks, file);
  file.text += "\n]";
  top.text("traceName", "fsdpp");
  top.number("namesNotUtf8", file.replaced_names + top.replaced());
  top.number("recordsWithoutTimes", file.untimed);
  top.number("arrowsOmitted", file.omitted_arrows);
}

}  // namespace

std::string chrome_trace_json(std::span<const Trace> ranks) {
  std::string all;
  ChromeFile file([&](std::string_view piece) { all += piece; });
  write_all(ranks, file);
  file.flush();
  return all + "\n";
}

void export_chrome_trace(const std::string& path, std::span<const Trace> ranks) {
  OutFile out(path);
  ChromeFile file([&](std::string_view piece) { out.write(piece); });
  write_all(ranks, file);
  file.text += '\n';
  file.flush();
  out.finish();
}

void export_chrome_trace(const std::string& path, const Trace& trace) { export_chrome_trace(path, std::span(&trace, 1)); }

}  // namespace fsdpp::profiler

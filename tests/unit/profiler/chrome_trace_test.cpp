#include "fsdpp/profiler/chrome_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "profiler/json_text.h"

namespace fsdpp::profiler {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;

constexpr int64_t kBase = 1'764'000'000'123'456'789;

/// Names of every kind that have broken trace files.
std::vector<std::string> hostile_names() {
  return {"a\"b", "c\\d", std::string("line\nbreak\ttab\x01", 15), "层/θ/🙂", "]}", "", std::string(10'000, 'n'), "</script>", "\x7f", "\u2028"};
}

CpuOp op(const std::string& name, int64_t start, int64_t end, int64_t thread = 11) {
  CpuOp o;
  o.name = name;
  o.start_ns = kBase + start;
  o.end_ns = kBase + end;
  o.thread = thread;
  return o;
}

Kernel kernel(const std::string& name, int64_t start, int64_t end, int64_t correlation, int stream = 7) {
  Kernel k;
  k.name = name;
  k.start_ns = kBase + start;
  k.end_ns = kBase + end;
  k.correlation = correlation;
  k.stream = stream;
  return k;
}

Runtime launch(int64_t start, int64_t end, int64_t correlation) {
  Runtime r;
  r.name = "cudaLaunchKernel";
  r.start_ns = kBase + start;
  r.end_ns = kBase + end;
  r.thread = 11;
  r.correlation = correlation;
  r.launch = true;
  return r;
}

Trace empty_trace(int rank = 0) {
  Trace t;
  t.rank = rank;
  t.process = 4321;
  t.start_ns = kBase;
  t.end_ns = kBase + 1'000'000;
  return t;
}

json parse(const Trace& trace) { return json::parse(chrome_trace_json(std::span(&trace, 1))); }  // strict

std::vector<json> events(const json& file, const std::string& category, const std::string& phase = "X") {
  std::vector<json> found;
  for (const json& event : file["traceEvents"])
    if (event["ph"] == phase && event.value("cat", "") == category) found.push_back(event);
  return found;
}

std::string temporary(const std::string& name) {
  return (std::filesystem::path(testing::TempDir()) / ("fsdpp_chrome_" + std::to_string(getpid()) + "_" + name)).string();
}

TEST(ChromeTrace, NoEventAtAllThenValid) {
  const json file = parse(empty_trace());
  EXPECT_EQ(file["schemaVersion"], 1);
  EXPECT_EQ(file["baseTimeNanoseconds"], kBase);
  EXPECT_EQ(file["displayTimeUnit"], "ms");
  EXPECT_TRUE(file["traceEvents"].is_array());
  EXPECT_TRUE(events(file, "cpu_op").empty());
  EXPECT_EQ(file["distributedInfo"]["rank"], 0);
}

TEST(ChromeTrace, HostileNamesThenEachReadsBackByteForByte) {
  Trace t = empty_trace();
  int64_t at = 0;
  for (const std::string& name : hostile_names()) {
    t.cpu_ops.push_back(op(name, at, at + 10));
    t.kernels.push_back(kernel(name, at, at + 10, 1));
    Scope s;
    s.name = name;
    s.start_ns = kBase + at;
    s.end_ns = kBase + at + 10;
    t.scopes.push_back(s);
    t.metadata[name] = name;
    t.audit.notes.push_back(name);
    at += 20;
  }
  const json file = parse(t);
  const auto names = [&](const char* category) {
    std::vector<std::string> all;
    for (const json& event : events(file, category)) all.push_back(event["name"]);
    return all;
  };
  EXPECT_EQ(names("cpu_op"), hostile_names());
  EXPECT_EQ(names("kernel"), hostile_names());
  EXPECT_EQ(names("user_annotation"), hostile_names());
  for (const std::string& name : hostile_names()) EXPECT_EQ(file["meta." + name], name);
  EXPECT_EQ(file["audit"][0]["notes"], hostile_names());
  EXPECT_EQ(file["namesNotUtf8"], 0);
}

TEST(ChromeTrace, NamesThatAreNotUtf8ThenMarkedCountedAndOthersKept) {
  Trace t = empty_trace();
  for (const char* name : {"bad\xff name", "cut \xe5\xb1", "surrogate \xed\xa0\x80", "overlong \xc0\xaf", "good"}) t.cpu_ops.push_back(op(name, 0, 1));
  const json file = parse(t);
  EXPECT_EQ(file["namesNotUtf8"], 4);
  const auto ops = events(file, "cpu_op");
  ASSERT_EQ(ops.size(), 5U);
  EXPECT_EQ(ops[0]["name"], "bad\xEF\xBF\xBD name");
  EXPECT_EQ(ops[4]["name"], "good");
}

TEST(ChromeTrace, NumbersAtTheEdgeThenKept) {
  Trace t = empty_trace();
  t.metadata["max"] = std::numeric_limits<int64_t>::max();
  t.metadata["min"] = std::numeric_limits<int64_t>::min();
  t.metadata["nan"] = std::nan("");
  t.metadata["inf"] = std::numeric_limits<double>::infinity();
  t.metadata["ninf"] = -std::numeric_limits<double>::infinity();
  t.metadata["tenth"] = 0.1;
  t.cpu_ops.push_back(op("mm", 0, 1));
  t.cpu_ops[0].shapes = "[[0, 3], [], [[2], [4, 5]]]";
  t.cpu_ops[0].dtypes = "['float', '', 'Scalar']";
  const json file = parse(t);
  EXPECT_EQ(file["meta.max"].get<int64_t>(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(file["meta.min"].get<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(file["meta.nan"], "NaN");
  EXPECT_EQ(file["meta.inf"], "Infinity");
  EXPECT_EQ(file["meta.ninf"], "-Infinity");
  EXPECT_EQ(file["meta.tenth"], 0.1);
  const json args = events(file, "cpu_op")[0]["args"];
  EXPECT_EQ(args["Input Dims"], json::parse("[[0,3],[],[[2],[4,5]]]"));
  EXPECT_EQ(args["Input type"], json::parse(R"(["float","","Scalar"])"));
}

TEST(ChromeTrace, ShapesThatAreNoListThenAString) {
  for (const char* text : {"[[1, 2]", "[1, 2]]", "[1,, 2]", "free text", "[01]", "['a]", "[\"a\"]", "[1 2]"}) {
    Trace t = empty_trace();
    t.cpu_ops.push_back(op("mm", 0, 1));
    t.cpu_ops[0].shapes = text;
    EXPECT_EQ(events(parse(t), "cpu_op")[0]["args"]["Input Dims"], text);
  }
}

TEST(ChromeTrace, TimesThenExactInMicroseconds) {
  Trace t = empty_trace();
  t.cpu_ops = {op("a", 1'234'567, 1'234'568)};
  const std::string text = chrome_trace_json(std::span(&t, 1));
  EXPECT_THAT(text, testing::HasSubstr("\"ts\":1234.567,\"dur\":0.001"));
  std::string number;
  append_json_us(number, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(number, "-9223372036854775.808");
}

TEST(ChromeTrace, KernelThenFieldsOfTheFormatAndAnArrowFromItsLaunch) {
  Trace t = empty_trace();
  Device d;
  d.sm_count = 132;
  d.name = "NVIDIA H200";
  d.max_threads_per_sm = 2048;
  t.devices = {d};
  t.cpu_ops = {op("mm", 0, 100)};
  t.cpu_ops[0].id = 9;
  t.runtime = {launch(10, 20, 55)};
  Kernel k = kernel("gemm", 200, 300, 55);
  k.grid[0] = 264;
  k.block[0] = 256;
  k.op = 0;
  t.kernels = {k};
  const json file = parse(t);
  EXPECT_EQ(file["deviceProperties"][0]["numSms"], 132);
  const json event = events(file, "kernel")[0];
  EXPECT_EQ(event["pid"], 0);
  EXPECT_EQ(event["tid"], 7);
  const json args = event["args"];
  EXPECT_EQ(args["External id"], 9);
  EXPECT_EQ(args["correlation"], 55);
  EXPECT_EQ(args["grid"], json::parse("[264,1,1]"));
  EXPECT_EQ(args["blocks per SM"], 2.0);
  EXPECT_EQ(args["warps per SM"], 16.0);
  EXPECT_EQ(args["est. achieved occupancy %"], 25);  // 8 blocks of 8 warps would fit, the grid gives 2 to each
  const auto starts = events(file, "ac2g", "s");
  const auto ends = events(file, "ac2g", "f");
  ASSERT_EQ(starts.size(), 1U);
  ASSERT_EQ(ends.size(), 1U);
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_EQ(starts[0]["pid"], 4321);
  EXPECT_EQ(ends[0]["tid"], 7);
  EXPECT_EQ(ends[0]["bp"], "e");
}

TEST(ChromeTrace, KernelBeforeItsLaunchThenTimesKeptAndArrowCountedAsOmitted) {
  Trace t = empty_trace();
  t.runtime = {launch(100, 120, 1), launch(200, 210, 2)};
  t.kernels = {kernel("early", 90, 95, 1)};
  const json file = parse(t);
  EXPECT_EQ(file["arrowsOmitted"], 1);
  EXPECT_TRUE(events(file, "ac2g", "s").empty());
  EXPECT_TRUE(events(file, "ac2g", "f").empty());  // nor a dead one for the launch without a kernel
  EXPECT_EQ(events(file, "kernel")[0]["ts"], 0.09);
}

TEST(ChromeTrace, OverlapOnAStreamThenTwoRows) {
  Trace t = empty_trace();
  t.kernels = {kernel("a", 0, 100, 1), kernel("b", 50, 150, 2), kernel("c", 100, 120, 3), kernel("d", 150, 160, 4)};
  std::map<std::string, int64_t> rows;
  const json file = parse(t);
  for (const json& event : events(file, "kernel")) {
    rows[event["name"]] = event["tid"];
    EXPECT_EQ(event["args"]["stream"], 7);
  }
  EXPECT_EQ(rows["a"], 7);
  EXPECT_NE(rows["b"], 7);
  EXPECT_EQ(rows["c"], 7);
  EXPECT_EQ(rows["d"], 7);
}

TEST(ChromeTrace, RecordsWithoutTimesThenLeftOutAndCounted) {
  Trace t = empty_trace();
  Kernel k;
  k.name = "untimed";
  t.kernels = {k, kernel("timed", 1, 2, 1)};
  const json file = parse(t);
  EXPECT_EQ(file["recordsWithoutTimes"], 1);
  EXPECT_EQ(events(file, "kernel").size(), 1U);
}

TEST(ChromeTrace, BackwardOperatorThenAnArrowFromItsForward) {
  Trace t = empty_trace();
  t.cpu_ops = {op("aten::mm", 0, 10), op("MmBackward0", 50, 60, 12)};
  for (CpuOp& o : t.cpu_ops) o.sequence = 3;
  t.cpu_ops[1].category = CpuOp::Category::Backward;
  t.cpu_ops[1].forward_thread = 1;
  const json file = parse(t);
  ASSERT_EQ(events(file, "fwdbwd", "s").size(), 1U);
  EXPECT_EQ(events(file, "fwdbwd", "f")[0]["tid"], 12);
}

TEST(ChromeTrace, StepsCopiesWaitsOverheadMemoryThenEachInItsCategory) {
  Trace t = empty_trace();
  t.steps = {{3, kBase, kBase + 100, 11}};
  Copy copy;
  copy.kind = Copy::Kind::HostToDevice;
  copy.bytes = 1000;
  copy.start_ns = kBase + 10;
  copy.end_ns = kBase + 20;
  Copy set = copy;
  set.kind = Copy::Kind::Memset;
  t.copies = {copy, set};
  Sync sync;
  sync.kind = Sync::Kind::StreamWaitEvent;
  sync.start_ns = sync.end_ns = kBase + 5;
  sync.event_correlation = 77;
  t.syncs = {sync};
  Overhead overhead{"COMMAND_BUFFER_FULL", kBase + 1, kBase + 2, 11};
  t.overheads = {overhead};
  MemoryEvent memory;
  memory.time_ns = kBase + 3;
  memory.bytes = 512;
  t.memory = {memory};
  const json file = parse(t);
  EXPECT_EQ(events(file, "user_annotation")[0]["name"], "ProfilerStep#3");
  EXPECT_EQ(events(file, "gpu_memcpy")[0]["args"]["memory bandwidth (GB/s)"], 100.0);
  EXPECT_EQ(events(file, "gpu_memset").size(), 1U);
  EXPECT_EQ(events(file, "cuda_sync")[0]["args"]["wait_on_cuda_event_record_corr_id"], 77);
  EXPECT_EQ(events(file, "overhead")[0]["pid"], -1);
  EXPECT_EQ(events(file, "cpu_instant_event", "i")[0]["args"]["Bytes"], 512);
}

TEST(ChromeTrace, WrittenThenThereIsOneFileAndNoTemporary) {
  const std::string path = temporary("one.json");
  Trace t = empty_trace();
  t.cpu_ops = {op("mm", 0, 10)};
  export_chrome_trace(path, t);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(), chrome_trace_json(std::span(&t, 1)));
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::TempDir()))
    files += entry.path().filename().string().find(std::filesystem::path(path).filename().string()) == 0;
  EXPECT_EQ(files, 1);
  std::remove(path.c_str());
}

TEST(ChromeTrace, CompressedThenTheSameTextInside) {
  const std::string path = temporary("big.json.gz");
  Trace t = empty_trace();
  for (int i = 0; i < 20'000; ++i) t.cpu_ops.push_back(op("aten::mm", i * 100, i * 100 + 50));
  export_chrome_trace(path, t);
  const std::string expected = chrome_trace_json(std::span(&t, 1));
  std::string text(expected.size() + 1, '\0');
  gzFile file = gzopen(path.c_str(), "rb");
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(gzread(file, text.data(), static_cast<unsigned>(text.size())), static_cast<int>(expected.size()));
  gzclose(file);
  text.resize(expected.size());
  EXPECT_EQ(text, expected);
  EXPECT_LT(std::filesystem::file_size(path), expected.size() / 8);
  std::remove(path.c_str());
}

TEST(ChromeTrace, FolderThatIsMissingThenErrorAndTheOldFileStays) {
  EXPECT_THROW(export_chrome_trace("/nowhere/at/all/trace.json", empty_trace()), Error);
  EXPECT_THROW((void)chrome_trace_json({}), UsageError);
}

Collective collective(int64_t start, int64_t end, int64_t sequence) {
  Collective c;
  c.comm = "shard";
  c.op = "all_gather";
  c.label = "layers.0";
  c.sequence = sequence;
  c.start_ns = kBase + start;
  c.end_ns = kBase + end;
  c.thread = 11;
  return c;
}

TEST(Merge, TwoRanksThenProcessesByRankTimesOfRank0AndArrowsBetweenThem) {
  std::vector<Trace> ranks{empty_trace(0), empty_trace(1)};
  ranks[1].clock_offset_ns = -500;
  ranks[0].collectives = {collective(1000, 2000, 0), collective(3000, 4000, 1)};
  ranks[1].collectives = {collective(1700, 2600, 0)};
  for (Trace& t : ranks) {
    t.kernels = {kernel("k", 5000, 6000, 1)};
    t.runtime = {launch(4500, 4600, 1)};
  }
  const json file = json::parse(chrome_trace_json(ranks));
  EXPECT_EQ(file["baseTimeNanoseconds"], kBase - 500);
  EXPECT_EQ(file["audit"].size(), 2U);
  const auto kernels = events(file, "kernel");
  ASSERT_EQ(kernels.size(), 2U);
  EXPECT_EQ(kernels[0]["pid"], 0);
  EXPECT_EQ(kernels[1]["pid"], 1000);
  EXPECT_EQ(kernels[0]["ts"], 5.5);
  EXPECT_EQ(kernels[1]["ts"], 5.0);  // its clock is 500 ns ahead
  const auto starts = events(file, "collective", "s");
  const auto ends = events(file, "collective", "f");
  ASSERT_EQ(starts.size(), 1U);  // sequence 1 is on one rank alone
  EXPECT_EQ(starts[0]["id"], ends[0]["id"]);
  EXPECT_EQ(starts[0]["ts"], 1.5);
  EXPECT_EQ(ends[0]["ts"], 1.7);
  const auto arrows = events(file, "ac2g", "s");
  ASSERT_EQ(arrows.size(), 2U);
  EXPECT_NE(arrows[0]["id"], arrows[1]["id"]);  // correlations of two processes may be equal
}

TEST(Merge, GatheredBytesThenOneFileOnRank0) {
  const std::string path = temporary("merged.json");
  std::vector<Trace> ranks{empty_trace(0), empty_trace(1)};
  for (Trace& t : ranks) t.world_size = 2;
  const auto from_both = [&](const std::string& mine) {
    EXPECT_EQ(mine, to_bytes(ranks[0]));
    return std::vector<std::string>{to_bytes(ranks[1]), mine};
  };
  export_merged_chrome_trace(path, ranks[0], from_both);
  EXPECT_EQ(json::parse(std::ifstream(path))["audit"].size(), 2U);
  std::remove(path.c_str());
  export_merged_chrome_trace(path, ranks[1], [](const std::string&) { return std::vector<std::string>{}; });
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THROW(export_merged_chrome_trace(path, ranks[0], [&](const std::string& mine) { return std::vector<std::string>{mine}; }), Error);
}

TEST(Merge, ClockSamplesThenTheShortestRoundTripDecides) {
  const std::vector<ClockSample> samples{{0, 5'000, 1'000}, {2'000, 6'600, 2'200}, {3'000, 9'000, 9'000}};
  const ClockOffset offset = estimate_clock_offset(samples);
  EXPECT_EQ(offset.offset_ns, 6'600 - 2'100);
  EXPECT_EQ(offset.uncertainty_ns, 100);
  EXPECT_THROW((void)estimate_clock_offset({}), UsageError);
}

TEST(Merge, OtherHostsThenClocksByTheMedianOfSharedCollectives) {
  std::vector<Trace> ranks{empty_trace(0), empty_trace(1), empty_trace(2), empty_trace(3)};
  ranks[0].host = ranks[1].host = "a";
  ranks[2].host = ranks[3].host = "b";
  for (int64_t i = 0; i < 5; ++i) {
    ranks[0].collectives.push_back(collective(0, 1000 * i, i));
    ranks[1].collectives.push_back(collective(0, 1000 * i + 7, i));
    ranks[2].collectives.push_back(collective(0, 1000 * i + 50'000 + (i == 4 ? 900 : i), i));  // one late
  }
  align_clocks(ranks);
  EXPECT_EQ(ranks[1].clock_offset_ns, 0);  // the same host, the same clock
  EXPECT_EQ(ranks[2].clock_offset_ns, -50'002);
  EXPECT_EQ(ranks[3].clock_offset_ns, 0);  // nothing in common
  align_clocks({});
}

TEST(Merge, SkewThenTheWorstCollective) {
  std::vector<Trace> ranks{empty_trace(0), empty_trace(1)};
  ranks[0].collectives = {collective(0, 100, 0), collective(0, 500, 1), collective(0, 9000, 2)};
  ranks[1].collectives = {collective(0, 130, 0), collective(0, 450, 1)};
  EXPECT_EQ(worst_collective_skew_ns(ranks), 50);
  ranks[1].collectives.clear();
  EXPECT_EQ(worst_collective_skew_ns(ranks), -1);
}

/// Every list has one record, and no field its default.
Trace full_trace() {
  Trace t = empty_trace(3);
  t.world_size = 8;
  t.host = "host \"a\"";
  t.has_cuda = t.with_flops = true;
  t.metadata = {{"a", std::string("b")}, {"c", int64_t{-4}}, {"d", 0.25}};
  t.devices.resize(1);
  t.devices[0].name = "H200";
  t.devices[0].shared_per_sm = 233'472;
  t.cpu_ops = {op(hostile_names()[2], 1, 2)};
  t.cpu_ops[0].category = CpuOp::Category::Backward;
  t.cpu_ops[0].flops = 1e12;
  t.kernels = {kernel("k", 1, 2, 3)};
  t.kernels[0].grid[2] = 65'535;
  t.copies.resize(1);
  t.copies[0].kind = Copy::Kind::PeerToPeer;
  t.copies[0].pinned = false;
  t.runtime = {launch(1, 2, 3)};
  t.scopes.resize(1);
  t.scopes[0].kind = trace::Kind::Reduce;
  t.syncs.resize(1);
  t.events.resize(1);
  t.overheads = {{"X", 1, 2, 3}};
  t.memory.resize(1);
  t.memory[0].category = MemoryEvent::Category::Gathered;
  t.memory[0].before = true;
  t.collectives = {collective(1, 2, 3)};
  t.steps = {{1, 2, 3, 4}};
  t.audit.overhead_ns = {{"Y", 5}};
  t.audit.errors = {"e"};
  return t;
}

TEST(Bytes, FullTraceThenReadsBackEqual) {
  const Trace t = full_trace();
  const std::string bytes = to_bytes(t);
  const Trace back = from_bytes(bytes);
  EXPECT_EQ(to_bytes(back), bytes);
  EXPECT_EQ(chrome_trace_json(std::span(&back, 1)), chrome_trace_json(std::span(&t, 1)));
  EXPECT_EQ(back.memory[0].category, MemoryEvent::Category::Gathered);
  EXPECT_TRUE(back.memory[0].before);
  EXPECT_FALSE(back.copies[0].pinned);
  EXPECT_EQ(std::get<int64_t>(back.metadata.at("c")), -4);
}

TEST(Bytes, CutOrForeignThenError) {
  const std::string bytes = to_bytes(full_trace());
  for (size_t n = 0; n < bytes.size(); ++n) EXPECT_THROW((void)from_bytes(bytes.substr(0, n)), Error) << n;
  EXPECT_THROW((void)from_bytes(bytes + "x"), Error);
  EXPECT_THROW((void)from_bytes("{\"schemaVersion\": 1}"), Error);
}

}  // namespace
}  // namespace fsdpp::profiler

#include "fsdpp/profiler/compare.h"

#include <gmock/gmock.h>

#include <cmath>

#include "fsdpp/base/error.h"
#include "fsdpp/profiler/chrome_trace.h"
#include "fsdpp/profiler/report.h"
#include "report_example.h"

namespace fsdpp::profiler::testing {
namespace {

using ::testing::HasSubstr;
using Change = Difference::Verdict;

std::string report_of(const Trace& trace) { return report_json({&trace, 1}); }

/// One kernel of each kind, with times in µs; "gemm" takes `gemm_us`.
std::string with_gemm(int64_t gemm_us, int64_t gather_us = 100) {
  Schedule s(0, 10'000'000);
  s.kernel("gemm", 0, gemm_us * 1000);
  s.kernel("norm", 4'000'000, 4'500'000);
  s.gather("layers.0", 6'000'000, 6'000'000 + gather_us * 1000);
  return report_of(s.trace);
}
std::vector<std::string> regressions(const Comparison& c) {
  std::vector<std::string> out;
  for (const Difference& d : c.rows) {
    if (d.verdict == Change::Regression) out.push_back(d.figure);
  }
  return out;
}
Difference row(const Comparison& c, const std::string& figure) {
  for (const Difference& d : c.rows) {
    if (d.figure == figure) return d;
  }
  return {};
}

TEST(Compare, OfEqualReportsThenNothingRegressed) {
  const std::string a = with_gemm(1000);
  const Comparison c = compare(a, a);
  EXPECT_FALSE(c.regressed());
  EXPECT_EQ(row(c, "kernel gemm").percent(), 0);
}

TEST(Compare, WhenOneKernelGrewThenItAndItsSumAreNamed) {
  const Comparison c = compare(with_gemm(1000), with_gemm(1100));
  EXPECT_TRUE(c.regressed());
  EXPECT_THAT(regressions(c), ::testing::ElementsAre("kernel gemm", "compute"));
  EXPECT_NEAR(row(c, "kernel gemm").percent(), 10, 1e-9);
  EXPECT_THAT(c.text(), HasSubstr("REGRESSION"));
  EXPECT_THAT(c.text(), HasSubstr("+10.0 %  kernel gemm"));
}

TEST(Compare, WithinTheThresholdThenSame) {
  CompareOptions loose;
  loose.threshold_percent = 10.5;
  EXPECT_FALSE(compare(with_gemm(1000), with_gemm(1100), loose).regressed());
}

TEST(Compare, WhenFasterThenBetterAndNoRegressionButIdle) {
  const Comparison c = compare(with_gemm(1000, 300), with_gemm(900, 100));
  EXPECT_EQ(row(c, "kernel gemm").verdict, Change::Better);
  EXPECT_EQ(row(c, "unit layers.0").verdict, Change::Better);
  EXPECT_FALSE(c.regressed());  // idle grew by 3.6 %
}

TEST(Compare, BelowTheFloorThenNoise) {
  CompareOptions options;
  options.floor_ms = 0.2;
  EXPECT_FALSE(compare(with_gemm(1000), with_gemm(1190), options).regressed());
}

TEST(Compare, OfWhatIsNewThenRegressionWithoutAPercentage) {
  Schedule s(0, 10'000'000);
  s.kernel("gemm", 0, 1'000'000);
  const Comparison c = compare(report_of(s.trace), with_gemm(1000));
  EXPECT_TRUE(std::isinf(row(c, "unit layers.0").percent()));
  EXPECT_EQ(row(c, "unit layers.0").verdict, Change::Regression);
  EXPECT_THAT(c.text(), HasSubstr("new  unit layers.0"));
  EXPECT_EQ(row(compare(with_gemm(1000), report_of(s.trace)), "unit layers.0").verdict, Change::Better);
}

TEST(Compare, OfAnythingElseThenRefused) {
  const std::string good = with_gemm(1);
  EXPECT_THROW(static_cast<void>(compare(good, "{}")), UsageError);
  EXPECT_THROW(static_cast<void>(compare("", good)), UsageError);
  EXPECT_THROW(static_cast<void>(compare(good, R"({"schema":"fsdpp.report","version":2,"summary":{}})")), UsageError);
}

/// What the analysis says must not depend on the road that the trace took.
class Reader : public ::testing::Test {
 protected:
  std::string file(const std::string& name) { return ::testing::TempDir() + "fsdpp_reader_" + name; }
  static void write(const std::string& path, const std::string& text) {
    std::unique_ptr<FILE, int (*)(FILE*)> f(fopen(path.c_str(), "wb"), &fclose);
    fwrite(text.data(), 1, text.size(), f.get());
  }
};

TEST_F(Reader, OfAChromeTraceThenTheSameNumbers) {
  const Trace t = Example().trace();
  const Analysis direct = analyse(t);
  for (const char* name : {"one.json", "one.json.gz"}) {
    export_chrome_trace(file(name), t);
    const std::vector<Trace> back = read_traces(file(name));
    ASSERT_EQ(back.size(), 1U);
    const Analysis read = analyse(back[0]);
    EXPECT_EQ(read.split.compute_ns, direct.split.compute_ns);
    EXPECT_EQ(read.split.exposed_ns, direct.split.exposed_ns);
    EXPECT_EQ(read.split.window_ns, direct.split.window_ns);
    EXPECT_EQ(read.idle_ns, direct.idle_ns);
    ASSERT_EQ(read.units.size(), direct.units.size());
    EXPECT_EQ(read.units[0].unit, direct.units[0].unit);
    EXPECT_EQ(read.units[0].exposed_ns, direct.units[0].exposed_ns);
    EXPECT_EQ(read.loader.total_ns, direct.loader.total_ns);
    EXPECT_EQ(read.steps.size(), direct.steps.size());
    EXPECT_EQ(read.memory.peak.bytes, direct.memory.peak.bytes);
    EXPECT_GT(read.memory.peak.total(), int64_t{10} << 30);
    EXPECT_EQ(back[0].audit.launches, t.audit.launches);
    EXPECT_EQ(back[0].devices.at(0).name, "NVIDIA H200");
    const auto a = speed_of_light(t, direct, data_sheet_ceilings("NVIDIA H200"));
    const auto b = speed_of_light(back[0], read, data_sheet_ceilings("NVIDIA H200"));
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].name, b[i].name);
      EXPECT_EQ(a[i].compute_percent, b[i].compute_percent);
      EXPECT_EQ(a[i].memory_percent, b[i].memory_percent);
      EXPECT_EQ(a[i].occupancy_percent, b[i].occupancy_percent);
    }
  }
}

TEST_F(Reader, OfAMergedTraceThenOneTraceARank) {
  const std::vector<Trace> ranks{Example(0).trace(), Example(1).trace()};
  export_chrome_trace(file("merged.json"), ranks);
  const std::vector<Trace> back = read_traces(file("merged.json"));
  ASSERT_EQ(back.size(), 2U);
  EXPECT_EQ(back[1].rank, 1);
  EXPECT_EQ(back[1].kernels.size(), ranks[1].kernels.size());
  EXPECT_EQ(back[1].collectives.size(), ranks[1].collectives.size());
  EXPECT_EQ(analyse(back[1]).split.exposed_ns, analyse(ranks[1]).split.exposed_ns);
}

TEST_F(Reader, OfBytesThenEverything) {
  const Trace t = Example(1).trace();
  write(file("own"), to_bytes(t));
  const std::vector<Trace> back = read_traces(file("own"));
  ASSERT_EQ(back.size(), 1U);
  EXPECT_EQ(report_of(back[0]), report_of(t));
}

TEST_F(Reader, OfPyTorchsTraceThenLoaderStepsAndKernels) {
  write(file("torch.json"),
        R"({"schemaVersion":1,"baseTimeNanoseconds":1700000000000000000,"distributedInfo":{"rank":3,"world_size":8},
    "traceEvents":[
    {"ph":"X","cat":"user_annotation","name":"ProfilerStep#12","pid":77,"tid":5,"ts":0.0,"dur":1000.0,"args":{}},
    {"ph":"X","cat":"user_annotation","name":"enumerate(DataLoader)#_Iter.__next__","pid":77,"tid":5,"ts":10.0,"dur":200.5,"args":{}},
    {"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":77,"tid":5,"ts":300.0,"dur":5.0,"args":{"correlation":9}},
    {"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":310.0,"dur":100.25,"args":{"device":0,"stream":7,"correlation":9,"grid":[2,1,1],"block":[64,1,1]}},
    {"ph":"X","cat":"kernel","name":"ncclDevKernel_AllGather","pid":0,"tid":20,"ts":400.0,"dur":50.0,
     "args":{"device":0,"stream":20,"Collective name":"_allgather_base","Process Group Name":"0","Process Group Description":"default_pg","Seq":4}}]})");
  const std::vector<Trace> back = read_traces(file("torch.json"));
  ASSERT_EQ(back.size(), 1U);
  EXPECT_EQ(back[0].rank, 3);
  const Analysis a = analyse(back[0]);
  EXPECT_EQ(a.split.window_ns, 1'000'000);
  EXPECT_EQ(a.split.compute_ns, 100'250);
  EXPECT_EQ(a.split.exposed_ns, 450'000 - 410'250);
  EXPECT_EQ(idle(a, IdleCause::DataLoader), 200'500);
  EXPECT_EQ(a.steps.at(0).step, 12);
  EXPECT_EQ(a.units.at(0).unit, "default_pg");
  EXPECT_EQ(back[0].audit.launches, 1);
}

TEST_F(Reader, OfDamagedFilesThenTheFileIsNamed) {
  write(file("damaged.json"), "{\"traceEvents\":[{");
  write(file("other.json"), "{\"hello\":1}");
  for (const char* name : {"damaged.json", "other.json", "missing.json"}) {
    try {
      static_cast<void>(read_traces(file(name)));
      FAIL() << name;
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr(name));
    }
  }
}

}  // namespace
}  // namespace fsdpp::profiler::testing

#include "fsdpp/profiler/report.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fsdpp/base/error.h"
#include "report_example.h"

namespace fsdpp::profiler::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

std::string text_of(const std::filesystem::path& path) {
  std::stringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}
json one_rank(const Trace& trace) { return json::parse(report_json({&trace, 1})); }

TEST(ReportJson, OfAHandMadeScheduleThenNumbersAreExact) {
  Schedule s(0, 4'000'000);
  s.step(7, 0, 2'000'000);
  s.step(8, 2'000'000, 4'000'000);
  s.kernel("gemm", 0, 1'500'000);
  s.gather("layers.0", 1'000'000, 2'500'000);
  const json j = one_rank(s.trace);
  EXPECT_EQ(j["schema"], "fsdpp.report");
  EXPECT_EQ(j["version"], kReportVersion);
  EXPECT_EQ(j["summary"]["steps"], 2);
  EXPECT_DOUBLE_EQ(j["summary"]["step_ms"], 2.0);
  EXPECT_DOUBLE_EQ(j["summary"]["exposed_ms_per_step"], 0.5);
  EXPECT_DOUBLE_EQ(j["summary"]["units"]["layers.0"], 0.5);
  EXPECT_DOUBLE_EQ(j["summary"]["kernels"]["gemm"], 0.75);
  const json& r = j["ranks"][0];
  EXPECT_DOUBLE_EQ(r["split"]["compute_ms"], 1.5);
  EXPECT_DOUBLE_EQ(r["split"]["idle_ms"], 1.5);
  EXPECT_NEAR(r["split"]["overlap"].get<double>(), 1.0 / 3, 1e-12);
  EXPECT_DOUBLE_EQ(r["units"][0]["exposed_by_op"]["all_gather"], 1.0);
  EXPECT_EQ(r["source"]["label"], "time only");
  EXPECT_THAT(r["source"]["text"].get<std::string>(), HasSubstr("record_shapes"));
}

TEST(ReportJson, OfTheTimelineThenColumnsHoldTheirShare) {
  Schedule s(0, 1000);
  s.kernel("gemm", 100, 350);
  ReportOptions options;
  options.timeline_columns = 10;
  const json j = json::parse(report_json({&s.trace, 1}, options));
  EXPECT_EQ(j["ranks"][0]["timeline"]["lanes"]["compute"], json({0, 1000, 1000, 500, 0, 0, 0, 0, 0, 0}));
}

TEST(ReportJson, WhenLaunchesLeftNoKernelThenTheAuditHasAnError) {
  Trace t;
  t.audit.launches = 12;
  EXPECT_EQ(one_rank(t)["ranks"][0]["audit"]["errors"].size(), 1U);
  t.audit.kernels = 12;
  EXPECT_TRUE(one_rank(t)["ranks"][0]["audit"]["errors"].empty());
}

TEST(ReportJson, OfTwoRanksThenMeansAndStragglers) {
  const std::vector<Trace> ranks{Example(0).trace(), Example(1).trace()};
  std::vector<Trace> late = ranks;
  for (Collective& c : late[1].collectives) c.start_ns += 10'000;  // rank 1 comes 10 µs after rank 0 to each
  const json j = json::parse(report_json(late));
  EXPECT_EQ(j["ranks"].size(), 2U);
  ASSERT_FALSE(j["stragglers"].empty());
  EXPECT_EQ(j["stragglers"][0]["rank"], 1);
  EXPECT_DOUBLE_EQ(j["summary"]["exposed_ms_per_step"],
                   json::parse(report_json({ranks.data(), 1}))["summary"]["exposed_ms_per_step"]);
}

TEST(ReportJson, OfKernelsOnAKnownDeviceThenModelledAndOnTheRoofline) {
  const json j = one_rank(Example().trace());
  EXPECT_EQ(j["ranks"][0]["source"]["label"], "modelled (FLOPs and bytes of the operator)");
  EXPECT_THAT(j["ceilings"]["origin"].get<std::string>(), HasSubstr("data sheet"));
  int on_roofline = 0;
  for (const json& k : j["ranks"][0]["kernels"]) on_roofline += k["roofline"].is_null() ? 0 : 1;
  EXPECT_EQ(on_roofline, 1);
}

TEST(ReportJson, OfBytesThatAreNotUtf8ThenStillJson) {
  Schedule s(0, 100);
  s.kernel("bad \xff\xfe \"name\"\n", 0, 50);
  EXPECT_THAT(one_rank(s.trace)["ranks"][0]["kernels"][0]["name"].get<std::string>(), HasSubstr("\xEF\xBF\xBD"));
}

TEST(ReportJson, WithoutRanksThenRefused) { EXPECT_THROW(static_cast<void>(report_json({})), UsageError); }

TEST(ReportText, OfTwoRanksThenLabelRoofsVerdictsAndAudit) {
  const Example a(0), b(1);
  const std::vector<Trace> ranks{a.trace(), b.trace()};
  Counters counters;
  counters.rungs = {{Source::Measured, false, "no privileges"}};
  counters.notes = {"V2 was not counted"};
  const std::string text = report_text(report_json(ranks, {.ceilings = {}, .counters = {counters, counters}}));
  EXPECT_THAT(text, HasSubstr("data sheet (H200"));
  EXPECT_THAT(text, HasSubstr("rank 1 on node-1"));
  EXPECT_THAT(text, HasSubstr("speed of light: modelled (FLOPs and bytes of the operator); not measured (range profiler): no privileges"));
  EXPECT_THAT(text, HasSubstr("counters: V2 was not counted"));
  EXPECT_THAT(text, HasSubstr("memory-bound"));
  EXPECT_THAT(text, HasSubstr("data loader: 3 waits, 1.200 ms"));
  EXPECT_THAT(text, HasSubstr("dropped records 0"));
  EXPECT_THROW(static_cast<void>(report_text("{}")), UsageError);
}

TEST(ReportHtml, OfHostileNamesThenNoElementEndsEarlyAndNothingIsLoaded) {
  const Trace t = Example().trace();
  const std::string html = report_html(report_json({&t, 1}));
  EXPECT_THAT(html, Not(HasSubstr("alert(1)</script>")));
  EXPECT_THAT(html, HasSubstr("alert(1)\\u003c/script>"));
  std::string without_namespace = html;
  const size_t at = without_namespace.find("http://www.w3.org/2000/svg");
  ASSERT_NE(at, std::string::npos);
  without_namespace.erase(at, 26);
  EXPECT_THAT(without_namespace, Not(HasSubstr("http")));
  EXPECT_THAT(html, Not(HasSubstr("@import")));
  EXPECT_THAT(html, Not(HasSubstr(" src=")));
  EXPECT_LT(html.size(), 150'000U);
}
TEST(ReportHtml, OfForeignOrNewerJsonThenRefused) {
  EXPECT_THROW(static_cast<void>(report_html("{}")), UsageError);
  EXPECT_THROW(static_cast<void>(report_html("not json")), UsageError);
  EXPECT_THROW(static_cast<void>(report_html(R"({"schema":"fsdpp.report","version":99})")), UsageError);
}

TEST(WriteReport, ThenPageAndJsonLieSideBySide) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "fsdpp_report";
  std::filesystem::create_directories(folder);
  const Trace t = Example().trace();
  write_report((folder / "run.html").string(), {&t, 1});
  EXPECT_THAT(text_of(folder / "run.html"), HasSubstr("<!doctype html>"));
  EXPECT_EQ(json::parse(text_of(folder / "run.json"))["schema"], "fsdpp.report");
  EXPECT_THROW(write_report((folder / "run.json").string(), {&t, 1}), UsageError);
  EXPECT_THROW(write_report((folder / "no/such/run.html").string(), {&t, 1}), Error);
}

}  // namespace
}  // namespace fsdpp::profiler::testing

#include <gmock/gmock.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "fsdpp/profiler/report.h"
#include "report_example.h"

/// The page in a real browser without a window: what its script leaves in the document.
namespace fsdpp::profiler::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Rendered {
  std::string dom;      ///< the document after the script ran
  std::string console;  ///< errors and messages of the page
};

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), &pclose);
  std::string out;
  std::array<char, 4096> buffer{};
  while (const size_t n = fread(buffer.data(), 1, buffer.size(), pipe.get())) out.append(buffer.data(), n);
  return out;
}

Rendered render(const std::vector<Trace>& ranks) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / ("fsdpp_browser_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string page = (folder / "report.html").string();
  write_report(page, ranks);
  const std::string log = (folder / "console.txt").string();
  const std::string dom = output_of(
      std::string(FSDPP_CHROMIUM) + " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=" +
      (folder / "profile").string() + " --enable-logging=stderr --v=0 --virtual-time-budget=4000 --dump-dom file://" +
      page + " 2>" + log);
  Rendered out{dom, output_of("grep CONSOLE " + log)};
  std::filesystem::remove_all(folder);
  return out;
}

TEST(Page, OfTwoRanksThenEverySectionIsDrawnWithoutErrors) {
  const Rendered page = render({Example(0).trace(), Example(1).trace()});
  EXPECT_EQ(page.console, "");
  for (const char* id : {"kpi-step", "audit", "where-the-time-went", "timeline", "exposed-communication-per-unit",
                         "roofline", "top-kernels", "memory-over-time", "the-host"}) {
    EXPECT_THAT(page.dom, HasSubstr("id=\"" + std::string(id) + "\"")) << id;
  }
  EXPECT_THAT(page.dom, HasSubstr("rank 1 · node-1"));
  EXPECT_THAT(page.dom, HasSubstr("alert(1)&lt;/script&gt;"));  // text, not an element
  EXPECT_THAT(page.dom, HasSubstr("modelled (FLOPs and bytes of the operator)"));
  EXPECT_THAT(page.dom, Not(HasSubstr("NaN")));
  EXPECT_THAT(page.dom, Not(HasSubstr("undefined ms")));
}

TEST(Page, OfAHandMadeScheduleThenNumbersAreInTheDocument) {
  Schedule s(0, 4'000'000);
  s.step(7, 0, 2'000'000);
  s.step(8, 2'000'000, 4'000'000);
  s.kernel("gemm", 0, 1'500'000);
  s.gather("layers.0", 1'000'000, 2'500'000);
  const Rendered page = render({s.trace});
  EXPECT_EQ(page.console, "");
  EXPECT_THAT(page.dom, HasSubstr("<b id=\"kpi-step\">2.000 ms</b>"));
  EXPECT_THAT(page.dom, HasSubstr("<b id=\"kpi-exposed\">0.500 ms</b>"));
  EXPECT_THAT(page.dom, HasSubstr("<b id=\"kpi-overlap\">33.3 %</b>"));
  EXPECT_THAT(page.dom, HasSubstr("Sum exposed: 1.000 ms."));
  EXPECT_THAT(page.dom, HasSubstr("Allocations were not recorded"));
}

TEST(Page, OfAHostTraceThenOperatorsAreShown) {
  Schedule s(0, 1'000'000);
  s.op("aten::mm", 0, 500'000);
  const Rendered page = render({s.trace});
  EXPECT_EQ(page.console, "");
  EXPECT_THAT(page.dom, HasSubstr("Top operators"));
  EXPECT_THAT(page.dom, HasSubstr("No device was traced."));
}

TEST(Page, OfAnEmptyTraceThenNoErrorsAndAuditComplains) {
  Trace t;
  t.audit.launches = 3;
  const Rendered page = render({t});
  EXPECT_EQ(page.console, "");
  EXPECT_THAT(page.dom, HasSubstr("can’t be trusted"));
}

}  // namespace
}  // namespace fsdpp::profiler::testing

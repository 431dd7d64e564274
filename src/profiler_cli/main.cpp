#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <sstream>

#include "fsdpp/base/error.h"
#include "fsdpp/profiler/compare.h"
#include "fsdpp/profiler/report.h"

namespace {

using namespace fsdpp;
using namespace fsdpp::profiler;

constexpr int kRegression = 1;
constexpr int kUsage = 2;

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError("fsdpp-prof: can't read " + path);
  std::stringstream out;
  out << file.rdbuf();
  return out.str();
}

struct ReportArguments {
  std::vector<std::string> traces;
  std::string output = "report.html";
  ReportOptions options;
  double peak_tflops = 0;
  double peak_gbytes = 0;
};

int run_report(ReportArguments& a) {
  std::vector<Trace> ranks;
  for (const std::string& path : a.traces) {
    for (Trace& trace : read_traces(path)) ranks.push_back(std::move(trace));
  }
  if (a.peak_tflops > 0 || a.peak_gbytes > 0) {
    if (a.peak_tflops <= 0 || a.peak_gbytes <= 0)
      throw UsageError("fsdpp-prof: expected both --peak-tflops and --peak-gbytes");
    a.options.ceilings = {a.peak_tflops * 1e12, a.peak_gbytes * 1e9, 0, "given on the command line"};
  }
  write_report(a.output, ranks, a.options);
  std::cout << a.output << "\n";
  return 0;
}

int run_diff(const std::string& before, const std::string& after, const CompareOptions& options) {
  const Comparison c = compare(read_text(before), read_text(after), options);
  std::cout << c.text();
  return c.regressed() ? kRegression : 0;
}

int run(int argc, char** argv) {
  CLI::App app{"Reports on profiles of fsdpp, and compares them", "fsdpp-prof"};
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, and for diff equal or better; 1 diff found a regression; 2 wrong usage or unreadable "
      "files.");

  ReportArguments report;
  CLI::App* make = app.add_subcommand("report", "Writes an HTML report, and the same as JSON beside it");
  make->add_option("TRACE", report.traces, "Traces: one of all ranks, or one a rank (.json, .json.gz or fsdpp's own)")
      ->required();
  make->add_option("-o,--output", report.output, "The HTML file")->capture_default_str();
  make->add_option("--title", report.options.title, "Title of the report")->capture_default_str();
  make->add_option("--peak-tflops", report.peak_tflops, "Measured compute roof of the device, in TFLOP/s");
  make->add_option("--peak-gbytes", report.peak_gbytes, "Measured memory roof of the device, in GB/s");

  std::string before, after;
  CompareOptions options;
  CLI::App* diff = app.add_subcommand("diff", "Compares two reports (JSON); exit code 1 if the second one is worse");
  diff->add_option("A", before, "report.json before")->required();
  diff->add_option("B", after, "report.json after")->required();
  diff->add_option("--threshold", options.threshold_percent, "Growth in percent that counts as a regression")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  diff->add_option("--floor-ms", options.floor_ms, "Growth a step below which it is noise")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  }
  return make->parsed() ? run_report(report) : run_diff(before, after, options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return kUsage;
  }
}

#include <filesystem>

#include "base/enforce.h"
#include "profiler/out_file.h"
#include "profiler/report_json.h"

namespace fsdpp::profiler {
namespace {

/// Inside <script> no "<" may appear, else a name could end the element.
std::string for_script(const std::string& json) {
  std::string out;
  out.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

void write_file(const std::string& path, const std::string& text) {
  OutFile file(path);
  file.write(text);
  file.finish();
}

}  // namespace

std::string report_html(const std::string& json) {
  const Json parsed = Json::parse(json, nullptr, false);
  const bool ours = parsed.is_object() && parsed.value("schema", "") == "fsdpp.report";
  FSDPP_ENFORCE(ours, UsageError, "report: expected the JSON of report_json(), got {}", json.substr(0, 40));
  FSDPP_ENFORCE(parsed.value("version", 0) == kReportVersion, UsageError, "report: expected format {}, got {}",
                kReportVersion, parsed.value("version", 0));
  std::string out =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<link rel=\"icon\" href=\"data:,\">\n"
      "<title>fsdpp profile</title>\n<style>";
  out += report_style();
  out +=
      "</style>\n</head>\n<body>\n<noscript>This page draws itself with JavaScript; the JSON beside it has the same "
      "content.</noscript>\n"
      "<script type=\"application/json\" id=\"data\">";
  out += for_script(json);
  out += "</script>\n<script>";
  out += report_script_charts();
  out += report_script_page();
  out += "</script>\n</body>\n</html>\n";
  return out;
}

void write_report(const std::string& path, std::span<const Trace> ranks, const ReportOptions& options) {
  const std::string json = report_json(ranks, options);
  std::filesystem::path beside(path);
  beside.replace_extension(".json");
  FSDPP_ENFORCE(beside != path, UsageError, "report: expected the name of an HTML file, got {}. Try: report.html",
                path);
  write_file(beside.string(), json + "\n");
  write_file(path, report_html(json));
}

}  // namespace fsdpp::profiler

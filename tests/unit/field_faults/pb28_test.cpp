// Names and numbers that have broken trace files, from the program's ranges to the file.
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdpp/profiler/profiler.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::profiler {
namespace {

using nlohmann::json;

constexpr const char* kStep = "ProfilerStep#0";  // the window itself

std::vector<std::string> hostile_names() {
  return {"a\"b", "c\\d", std::string("line\nbreak\ttab\x01", 15), "层/θ/🙂", "]}", "", std::string(10'000, 'n')};
}

Options cpu_options() {
  Options options;
  options.activities = {Activity::Cpu};
  options.record_shapes = true;
  return options;
}

/// The file's text and, strictly parsed, what it says.
struct File {
  std::string text;
  json content;
};

File exported(const Profiler& profiler) {
  const auto path = std::filesystem::temp_directory_path() / ("fsdpp_hostile_" + std::to_string(::getpid()) + ".json");
  profiler.export_chrome_trace(path.string());
  std::ifstream stream(path, std::ios::binary);
  File file{{std::istreambuf_iterator<char>(stream), {}}, {}};
  std::filesystem::remove(path);
  file.content = json::parse(file.text);
  return file;
}

std::vector<std::string> names_of(const json& content, const std::string& category) {
  std::vector<std::string> names;
  for (const auto& event : content["traceEvents"])
    if (event["ph"] == "X" && event.value("cat", "") == category) names.push_back(event["name"]);
  return names;
}

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

/// Device records can't be made here: a kernel of each name, written as the recorded ones are.
json kernels_named_so() {
  Trace trace;
  trace.start_ns = 1;
  trace.end_ns = 1'000'000;
  int64_t at = 1;
  for (const auto& name : hostile_names()) {
    Kernel kernel;
    kernel.name = name;
    kernel.start_ns = at;
    kernel.end_ns = at + 10;
    at += 20;
    trace.kernels.push_back(kernel);
  }
  return json::parse(chrome_trace_json(std::span(&trace, 1)));
}

TEST(TraceFile, PB28_HostileNamesAndNumbersThenStrictJsonThatReadsBackEqual) {
  Profiler profiler(cpu_options());
  profiler.start();
  for (const auto& name : hostile_names()) trace::Scope scope(trace::Kind::User, name);
  for (const auto& name : hostile_names()) {
    RECORD_USER_SCOPE(name);
  }
  (void)at::mm(at::zeros({0, 3}), at::zeros({3, 2}));
  profiler.stop();
  const int64_t largest = std::numeric_limits<int64_t>::max();
  const double infinity = std::numeric_limits<double>::infinity();
  profiler.add_metadata("largest", largest);
  profiler.add_metadata("nan", std::nan(""));
  profiler.add_metadata("infinity", infinity);
  profiler.add_metadata("minus infinity", -infinity);
  const auto [text, file] = exported(profiler);

  auto expected = hostile_names();
  for (const auto& name : hostile_names()) expected.push_back(name);  // the scopes', then LibTorch's ranges
  expected.emplace_back(kStep);
  EXPECT_EQ(names_of(file, "user_annotation").size(), 15U);
  EXPECT_TRUE(sorted(names_of(file, "user_annotation")) == sorted(expected));  // 10,000 letters are no message
  EXPECT_EQ(file["namesNotUtf8"], 0);
  EXPECT_THAT(names_of(file, "cpu_op"), ::testing::Contains("aten::mm").Times(1)) << "a bad name loses no other event";
  for (const auto& event : file["traceEvents"]) {
    if (event["name"] != "aten::mm" || event["ph"] != "X") continue;
    EXPECT_EQ(event["args"]["Input Dims"], json::parse("[[0,3],[3,2]]"));
  }
  EXPECT_EQ(file["meta.largest"].get<int64_t>(), largest);
  EXPECT_THAT(text, ::testing::HasSubstr("\"meta.largest\":9223372036854775807"));
  EXPECT_EQ(file["meta.nan"], "NaN");
  EXPECT_EQ(file["meta.infinity"], "Infinity");
  EXPECT_EQ(file["meta.minus infinity"], "-Infinity");
  EXPECT_TRUE(names_of(kernels_named_so(), "kernel") == hostile_names());

  Profiler idle(cpu_options());  // and a run with no event at all
  idle.start();
  idle.stop();
  const auto empty = exported(idle).content;
  EXPECT_TRUE(empty["traceEvents"].is_array());
  EXPECT_THAT(names_of(empty, "user_annotation"), ::testing::ElementsAre(kStep));
  for (const char* category : {"cpu_op", "kernel"}) EXPECT_TRUE(names_of(empty, category).empty()) << category;
}

}  // namespace
}  // namespace fsdpp::profiler

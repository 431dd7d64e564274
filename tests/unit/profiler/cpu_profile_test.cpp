#include <ATen/ops/conv2d.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/activation.h>

#include <cstdio>
#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/profiler/profiler.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::profiler {
namespace {

using ::testing::HasSubstr;

Options cpu_options() {
  Options options;
  options.activities = {Activity::Cpu};
  return options;
}

int64_t calls(const Trace& trace, const std::string& name) {
  int64_t n = 0;
  for (const CpuOp& op : trace.cpu_ops) n += op.name == name;
  return n;
}

const CpuOp& first(const Trace& trace, const std::string& name) {
  for (const CpuOp& op : trace.cpu_ops)
    if (op.name == name) return op;
  throw Error("no operator " + name);
}

TEST(CpuProfile, TrainingStepsThenOperatorsForwardAndBackwardAreCounted) {
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 4));
  const at::Tensor x = at::rand({5, 8});
  Options options = cpu_options();
  options.record_shapes = options.with_flops = options.profile_memory = true;
  Profiler profiler(options);
  model->forward(x).sum().backward();  // before: not recorded
  profiler.start();
  for (int i = 0; i < 3; ++i) {
    trace::Scope scope(trace::Kind::User, "iteration");
    model->forward(x).sum().backward();
    profiler.step();
  }
  profiler.stop();
  model->forward(x).sum().backward();  // after: not recorded

  const Trace& t = profiler.trace();
  EXPECT_EQ(calls(t, "aten::addmm"), 6);
  EXPECT_EQ(t.steps.size(), 4U);
  EXPECT_TRUE(t.audit.errors.empty());
  const CpuOp& addmm = first(t, "aten::addmm");
  const CpuOp& transpose = first(t, "aten::transpose");
  ASSERT_GE(transpose.parent, 0);
  EXPECT_EQ(t.cpu_ops[transpose.parent].name, "aten::t");
  ASSERT_GE(addmm.scope, 0);
  EXPECT_EQ(t.scopes[addmm.scope].name, "iteration");
  EXPECT_THAT(addmm.shapes, HasSubstr("[[16], [5, 8], [8, 16]"));
  EXPECT_EQ(addmm.flops, 2.0 * 5 * 8 * 16);
  EXPECT_GT(addmm.end_ns, addmm.start_ns);
  bool backward = false;
  for (const CpuOp& op : t.cpu_ops) backward = backward || (op.category == CpuOp::Category::Backward && op.sequence >= 0);
  EXPECT_TRUE(backward);
  int64_t taken = 0;
  for (const MemoryEvent& event : t.memory) taken += event.bytes > 0;
  EXPECT_GT(taken, 0);
  const std::string table = profiler.key_averages().table("cpu_time_total", 10);
  EXPECT_THAT(table, HasSubstr("aten::addmm"));
  EXPECT_THAT(table, HasSubstr("Self CPU Mem"));
  EXPECT_THAT(profiler.key_averages(GroupBy::Unit).table("cpu_time_total"), HasSubstr("iteration"));
}

TEST(CpuProfile, MemoryThenTheBytesOfATensor) {
  Options options = cpu_options();
  options.profile_memory = true;
  Profiler profiler(options);
  profiler.start();
  { const at::Tensor x = at::rand({1024}); }
  profiler.stop();
  int64_t sum = 0, most = 0;
  for (const MemoryEvent& event : profiler.trace().memory) most = std::max(most, sum += event.bytes);
  EXPECT_EQ(most, 4096);
  EXPECT_EQ(sum, 0);
  EXPECT_FALSE(c10::memoryProfilingEnabled());  // nothing stays behind
}

TEST(CpuProfile, ConvolutionThenItsFlopsOnce) {
  Options options = cpu_options();
  options.with_flops = true;
  Profiler profiler(options);
  profiler.start();
  (void)at::conv2d(at::rand({2, 3, 8, 8}), at::rand({4, 3, 3, 3}), {}, 1, 1);
  profiler.stop();
  double flops = 0;
  for (const Average& row : profiler.key_averages().rows()) flops += row.flops;
  EXPECT_EQ(flops, 2.0 * 2 * 4 * 8 * 8 * 27);
  EXPECT_TRUE(profiler.trace().cpu_ops[0].shapes.empty());  // not asked for
}

TEST(CpuProfile, OtherThreadsThenTheirOperatorsToo) {
  Profiler profiler(cpu_options());
  profiler.start();
  std::thread([] { (void)at::mm(at::rand({2, 2}), at::rand({2, 2})); }).join();
  profiler.stop();
  EXPECT_EQ(calls(profiler.trace(), "aten::mm"), 1);
}

TEST(CpuProfile, OperatorOpenAtTheEdgesThenCutAndCounted) {
  Profiler profiler(cpu_options());
  {
    auto before = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    before->before("opened before");
    profiler.start();
  }
  auto across = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  across->before("still open");
  profiler.stop();
  across.reset();
  const Trace& t = profiler.trace();
  EXPECT_EQ(calls(t, "opened before"), 0);
  EXPECT_EQ(first(t, "still open").end_ns, t.end_ns);
  EXPECT_EQ(t.audit.cut_by_window, 1);
}

TEST(CpuProfile, ScheduleThenTheCallbackSeesEachWindow) {
  Options options = cpu_options();
  options.schedule = Options::by({.wait = 1, .warmup = 1, .active = 2, .repeat = 2});
  std::vector<int64_t> mms;
  options.on_trace_ready = [&](Profiler& p) { mms.push_back(calls(p.trace(), "aten::mm")); };
  Profiler profiler(options);
  profiler.start();
  EXPECT_THROW((void)profiler.trace(), UsageError);
  for (int step = 0; step < 10; ++step) {
    (void)at::mm(at::rand({2, 2}), at::rand({2, 2}));
    profiler.step();
  }
  profiler.stop();
  EXPECT_THAT(mms, testing::ElementsAre(2, 2));
  EXPECT_EQ(profiler.trace().steps.front().step, 6);
}

TEST(CpuProfile, OffThenNoCallbackIsInstalled) {
  Options options = cpu_options();
  options.schedule = Options::by({.wait = 5, .active = 1});
  Profiler profiler(options);
  profiler.start();
  EXPECT_FALSE(at::hasCallbacks());
  EXPECT_EQ(trace::listener(), nullptr);
  profiler.stop();
  EXPECT_FALSE(at::hasCallbacks());
}

TEST(CpuProfile, SecondProfilerThenErrorUntilTheFirstStops) {
  Profiler first(cpu_options()), second(cpu_options());
  first.start();
  EXPECT_THROW(second.start(), UsageError);
  first.stop();
  EXPECT_NO_THROW(second.start());
  EXPECT_THROW(first.step(), UsageError);
}

TEST(CpuProfile, DestroyedWhileRunningThenNothingStaysInstalled) {
  {
    Profiler profiler(cpu_options());
    profiler.start();
  }
  EXPECT_FALSE(at::hasCallbacks());
  Profiler next(cpu_options());
  EXPECT_NO_THROW(next.start());
}

TEST(CpuProfile, CudaAskedForWithoutGpuThenTheHostIsRecordedAndANoteSaysWhy) {
  Profiler profiler{Options{}};
  profiler.start();
  (void)at::mm(at::rand({2, 2}), at::rand({2, 2}));
  profiler.stop();
  const Trace& t = profiler.trace();
  EXPECT_EQ(calls(t, "aten::mm"), 1);
  if (t.has_cuda) GTEST_SKIP() << "there is a GPU";
  ASSERT_EQ(t.audit.notes.size(), 1U);
  EXPECT_THAT(t.audit.notes[0], HasSubstr("the device was not traced"));
}

TEST(CpuProfile, HostileRangesThenTheFileIsStrictJson) {
  const std::vector<std::string> names{"a\"b", "c\\d", std::string("x\ny\t\x01", 5), "层/θ/🙂", "]}", "", std::string(10'000, 'n')};
  Profiler profiler(cpu_options());
  profiler.start();
  for (const std::string& name : names) {
    trace::Scope scope(trace::Kind::User, name);
    RECORD_USER_SCOPE(name);
  }
  profiler.stop();
  profiler.add_metadata("model", std::string("q\"uote"));
  const std::string path = testing::TempDir() + "fsdpp_cpu_profile.json";
  profiler.export_chrome_trace(path);
  const auto file = nlohmann::json::parse(std::ifstream(path));
  std::remove(path.c_str());
  std::map<std::string, int> seen;
  for (const auto& event : file["traceEvents"])
    if (event["ph"] == "X" && event["cat"] == "user_annotation") ++seen[event["name"]];
  for (const std::string& name : names) EXPECT_EQ(seen[name], 2) << name.substr(0, 20);
  EXPECT_EQ(file["meta.model"], "q\"uote");
}

TEST(CpuProfile, WrongOptionsThenConfigError) {
  Options none;
  none.activities.clear();
  EXPECT_THROW(Profiler{none}, ConfigError);
  Options small;
  small.device_buffer_bytes = 0;
  EXPECT_THROW(Profiler{small}, ConfigError);
}

}  // namespace
}  // namespace fsdpp::profiler

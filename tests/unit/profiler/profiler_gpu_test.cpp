#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdpp/profiler/ceilings.h"
#include "fsdpp/profiler/profiler.h"
#include "fsdpp/profiler/step_counters.h"
#include "fsdpp/trace/scope.h"

namespace fsdpp::profiler {
namespace {

using ::testing::IsEmpty;

class ProfilerGpu : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!at::hasCUDA()) return;
    (void)at::mm(at::rand({64, 64}, at::kCUDA), at::rand({64, 64}, at::kCUDA));  // loads libraries
    cudaDeviceSynchronize();
  }
  void SetUp() override {
    if (!at::hasCUDA()) FAIL() << "this program needs a GPU";
  }
};

void expect_clean(const Trace& t) {
  EXPECT_TRUE(t.has_cuda);
  EXPECT_THAT(t.audit.errors, IsEmpty());
  EXPECT_EQ(t.audit.dropped_records, 0);
  EXPECT_EQ(t.audit.unknown_records, 0);
  EXPECT_EQ(t.audit.truncated_buffers, 0);
  EXPECT_EQ(t.audit.zero_stamps, 0);
  EXPECT_EQ(t.audit.launches_without_kernel, 0);
  EXPECT_EQ(t.audit.kernels_without_launch, 0);
  EXPECT_EQ(t.audit.outside_window, 0);
  for (const std::string& note : t.audit.notes) std::printf("note: %s\n", note.c_str());
}

TEST_F(ProfilerGpu, FiveSessionsOfFiftyKernelsThenFiftyRecordsEach) {
  at::Tensor x = at::zeros({1024}, at::kCUDA);
  for (int session = 0; session < 5; ++session) {
    Profiler profiler{Options{}};
    profiler.start();
    for (int i = 0; i < 50; ++i) x.add_(1);
    profiler.stop();
    const Trace& t = profiler.trace();
    EXPECT_EQ(t.kernels.size(), 50U) << "session " << session;
    EXPECT_EQ(t.audit.launches, 50) << "session " << session;
    expect_clean(t);
    for (const Kernel& k : t.kernels) {
      ASSERT_GE(k.op, 0);
      EXPECT_EQ(t.cpu_ops[k.op].name, "aten::add_");
    }
    ASSERT_FALSE(t.devices.empty());
    EXPECT_GT(t.devices[0].sm_count, 0);
  }
}

TEST_F(ProfilerGpu, KernelTimesThenEqualToEventsWithinTwoPercent) {
  const at::Tensor a = at::rand({8192, 8192}, at::kCUDA), b = at::rand({8192, 8192}, at::kCUDA);
  (void)at::mm(a, b);
  cudaEvent_t start = nullptr, stop = nullptr;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Profiler profiler{Options{}};
  profiler.start();
  cudaEventRecord(start, stream);
  for (int i = 0; i < 10; ++i) (void)at::mm(a, b);
  cudaEventRecord(stop, stream);
  profiler.stop();
  float ms = 0;
  ASSERT_EQ(cudaEventElapsedTime(&ms, start, stop), cudaSuccess);
  int64_t ns = 0;
  for (const Kernel& k : profiler.trace().kernels) ns += k.end_ns - k.start_ns;
  std::printf("kernels %.3f ms, events %.3f ms\n", static_cast<double>(ns) / 1e6, static_cast<double>(ms));
  EXPECT_NEAR(static_cast<double>(ns) / 1e6, ms, 0.02 * ms);
  expect_clean(profiler.trace());
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

TEST_F(ProfilerGpu, KernelsThenAfterTheirLaunchAndInsideTheWindow) {
  const at::Tensor a = at::rand({2048, 2048}, at::kCUDA);
  Profiler profiler{Options{}};
  profiler.start();
  for (int i = 0; i < 20; ++i) (void)at::mm(a, a);
  profiler.stop();
  const Trace& t = profiler.trace();
  EXPECT_EQ(t.audit.out_of_order, 0);
  for (const Kernel& k : t.kernels) {
    EXPECT_GE(k.start_ns, t.start_ns);
    EXPECT_LE(k.end_ns, t.end_ns);
  }
}

TEST_F(ProfilerGpu, GraphCapturedInTheWindowThenReplayedKernelsHaveOperatorAndScope) {
  at::Tensor x = at::zeros({1024}, at::kCUDA);
  at::cuda::CUDAGraph graph;
  for (int session = 0; session < 2; ++session) {
    Profiler profiler{Options{}};
    profiler.start();
    if (session == 0) {
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
      graph.capture_begin();
      {
        trace::Scope scope(trace::Kind::User, "captured");
        for (int i = 0; i < 10; ++i) x.add_(1);
      }
      graph.capture_end();
    }
    for (int i = 0; i < 3; ++i) graph.replay();
    profiler.stop();
    const Trace& t = profiler.trace();
    expect_clean(t);
    EXPECT_EQ(t.audit.graph_launches, 3);
    EXPECT_EQ(t.audit.graph_kernels, 30);
    int placed = 0;
    for (const Kernel& k : t.kernels)
      placed += k.graph_node_id != 0 && k.op >= 0 && t.cpu_ops[k.op].name == "aten::add_" && k.scope >= 0 && t.scopes[k.scope].name == "captured";
    EXPECT_EQ(placed, session == 0 ? 30 : 0);  // the second window has no capture, and its notes say so
    EXPECT_EQ(t.audit.notes.empty(), session == 0);
  }
}

TEST_F(ProfilerGpu, CopiesAndWaitsThenRecorded) {
  const at::Tensor host = at::rand({1 << 20});
  Options options;
  options.profile_memory = true;
  Profiler profiler(options);
  profiler.start();
  const at::Tensor there = host.to(at::kCUDA);
  const at::Tensor back = there.cpu();
  profiler.stop();
  const Trace& t = profiler.trace();
  std::map<Copy::Kind, int64_t> bytes;
  for (const Copy& c : t.copies) bytes[c.kind] += c.bytes;
  EXPECT_EQ(bytes[Copy::Kind::HostToDevice], 4 << 20);
  EXPECT_EQ(bytes[Copy::Kind::DeviceToHost], 4 << 20);
  EXPECT_FALSE(t.syncs.empty());
  int64_t device_bytes = 0;
  for (const MemoryEvent& event : t.memory) device_bytes += event.device >= 0 && event.bytes > 0 ? event.bytes : 0;
  EXPECT_GE(device_bytes, 4 << 20);
  EXPECT_GT(profiler.key_averages().cuda_time_ns(), 0);
}

/// Says on stderr what it starts before it does, so that the last line names what did not return.
class SayingCounters final : public RangeCounters {
 public:
  explicit SayingCounters(std::unique_ptr<RangeCounters> counters) : counters_(std::move(counters)) {}
  ~SayingCounters() override { stage("end of counting"); }
  void begin_step() override { stage("start of a pass"), counters_->begin_step(), stage("the step"); }
  bool end_step() override { return stage("end of a pass"), counters_->end_step(); }
  std::vector<CounterValues> ranges() override { return stage("decoding"), counters_->ranges(); }
  int64_t dropped() const override { return counters_->dropped(); }
  static void stage(const std::string& what) { std::clog << "counters: " << what << std::endl; }

 private:
  std::unique_ptr<RangeCounters> counters_;
};
class SayingDevice final : public CounterDevice {
 public:
  std::unique_ptr<RangeCounters> open(const CounterRequest& request, int max_kernels) override {
    SayingCounters::stage("opening " + request.set + " for " + std::to_string(max_kernels) + " kernels");
    return std::make_unique<SayingCounters>(device_->open(request, max_kernels));
  }
  void watch_launches() override { SayingCounters::stage("callbacks of launches on"), device_->watch_launches(); }
  std::vector<std::string> launches() override { return SayingCounters::stage("callbacks of launches off"), device_->launches(); }

 private:
  std::unique_ptr<CounterDevice> device_ = cupti_counter_device(0);
};

/// Where counters are closed (rights, another holder) the rung must say so; where they are open, the verdicts must be right and
/// tracing must still work after counting.
TEST_F(ProfilerGpu, CountersOfAProductAndASumThenMeasuredOrAReason) {
  const auto bf16 = at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA);
  const at::Tensor a = at::rand({8192, 8192}, bf16), b = at::rand({8192, 8192}, bf16);
  at::Tensor sum = at::zeros({int64_t{1} << 28}, at::kCUDA);
  const auto work = [&] {
    (void)at::mm(a, b);
    sum.add_(1);
  };
  work();
  Profiler profiler{Options{}};
  profiler.start();
  work();
  profiler.stop();
  const Trace before = profiler.trace();
  StepCounters counting(std::make_unique<SayingDevice>(), before, {});
  while (!counting.done()) {
    counting.begin_step();
    work();
    counting.end_step();
  }
  const Counters counters = counting.take();
  std::printf("%s\n", choose_source(counters.rungs).text.c_str());
  for (const std::string& note : counters.notes) std::printf("note: %s\n", note.c_str());
  ASSERT_EQ(counters.rungs.size(), 1U);
  if (counters.rungs[0].usable) {
    for (const KernelLight& k : speed_of_light(before, analyse(before), measure_ceilings(0), counters)) {
      std::printf("%s: compute %.1f %%, memory %.1f %%, %s\n", k.name.substr(0, 60).c_str(), k.compute_percent.value_or(-1),
                  k.memory_percent.value_or(-1), to_string(judge(k).bound));
      EXPECT_EQ(k.source, Source::Measured);
      EXPECT_EQ(judge(k).bound, k.name.find("elementwise") != std::string::npos ? Bound::Memory : Bound::Compute) << k.name;
    }
  } else {
    EXPECT_FALSE(counters.rungs[0].reason.empty());
  }
  profiler.start();
  work();
  profiler.stop();
  EXPECT_EQ(profiler.trace().kernels.size(), before.kernels.size());
  expect_clean(profiler.trace());
}

TEST_F(ProfilerGpu, RoofsThenWithinTheDataSheets) {
  Profiler profiler{Options{}};
  profiler.start();
  profiler.stop();
  ASSERT_FALSE(profiler.trace().devices.empty());
  const Ceilings sheet = data_sheet_ceilings(profiler.trace().devices[0].name);
  const Ceilings roofs = measure_ceilings(0);
  std::printf("%.1f TFLOP/s, %.1f GB/s\n", roofs.flops_per_s / 1e12, roofs.bytes_per_s / 1e9);
  if (!sheet.known()) GTEST_SKIP() << "no data sheet of " << profiler.trace().devices[0].name;
  EXPECT_GT(roofs.flops_per_s, 0.4 * sheet.flops_per_s);
  EXPECT_LT(roofs.flops_per_s, 1.05 * sheet.flops_per_s);
  EXPECT_GT(roofs.bytes_per_s, 0.6 * sheet.bytes_per_s);
  EXPECT_LT(roofs.bytes_per_s, 1.05 * sheet.bytes_per_s);
}

TEST_F(ProfilerGpu, ManyLaunchesThenNoneIsLost) {
  at::Tensor x = at::zeros({16}, at::kCUDA);
  Options options;
  options.activities = {Activity::Cuda};
  Profiler profiler(options);
  profiler.start();
  for (int i = 0; i < 100'000; ++i) x.add_(1);
  profiler.stop();
  EXPECT_EQ(profiler.trace().kernels.size(), 100'000U);
  expect_clean(profiler.trace());
}

TEST_F(ProfilerGpu, SmallestOperatorsThenTheCostIsBounded) {
  at::Tensor x = at::zeros({16}, at::kCUDA);
  const auto time_step = [&] {
    cudaDeviceSynchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 2'000; ++i) x.add_(1);
    cudaDeviceSynchronize();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / 2'000;
  };
  double off = INFINITY, on = INFINITY;
  for (int round = 0; round < 10; ++round) {  // interleaved
    off = std::min(off, time_step());
    Profiler profiler{Options{}};
    profiler.start();
    on = std::min(on, time_step());
    profiler.stop();
  }
  std::printf("a launch-bound operator: %.2f us with the profiler off, %.2f us on\n", off, on);
  EXPECT_LT(on, 4 * off);
}

}  // namespace
}  // namespace fsdpp::profiler

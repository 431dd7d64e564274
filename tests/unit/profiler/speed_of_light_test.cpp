#include "fsdpp/profiler/speed_of_light.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "analysis_schedule.h"
#include "fsdpp/base/error.h"
#include "profiler/speed_of_light_metrics.h"

namespace fsdpp::profiler::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

KernelLight counted(double compute, double memory) {
  KernelLight k;
  k.name = "k";
  k.count = 1;
  k.total_ns = 1000;
  k.source = Source::Measured;
  k.compute_percent = compute;
  k.memory_percent = memory;
  return k;
}
Bound bound(double compute, double memory) { return judge(counted(compute, memory)).bound; }

TEST(Verdict, OfTheSeedsRulesThenLimitsAreExact) {
  EXPECT_EQ(bound(24.9, 75.1), Bound::Memory);
  EXPECT_NE(bound(25.0, 75.1), Bound::Memory);
  EXPECT_NE(bound(24.9, 75.0), Bound::Memory);
  EXPECT_EQ(bound(75.1, 49.9), Bound::Compute);
  EXPECT_NE(bound(75.0, 49.9), Bound::Compute);
  EXPECT_NE(bound(75.1, 50.0), Bound::Compute);
}

TEST(Verdict, OfEveryPairOfPercentagesThenOneKnownClass) {
  for (int c = 0; c <= 100; ++c) {
    for (int m = 0; m <= 100; ++m) {
      const Verdict v = judge(counted(c, m));
      ASSERT_NE(v.bound, Bound::Unknown) << c << " " << m;
      ASSERT_FALSE(v.fix.empty());
      ASSERT_EQ(v.bound == Bound::Memory, c < 25 && m > 75);
      ASSERT_EQ(v.bound == Bound::Compute, c > 75 && m < 50);
    }
  }
}

TEST(Verdict, OfTheFurtherClassesThenAsTabled) {
  EXPECT_EQ(bound(40, 60), Bound::MemoryLeaning);
  EXPECT_EQ(bound(60, 55), Bound::ComputeLeaning);
  EXPECT_EQ(bound(65, 70), Bound::Balanced);
  EXPECT_EQ(bound(59, 59), Bound::Latency);
  KernelLight cache = counted(20, 30);
  cache.l2_percent = 80;
  EXPECT_EQ(judge(cache).bound, Bound::Cache);
}

TEST(Verdict, WhenTheDeviceIdledLongerThanItWorkedThenLaunchBound) {
  KernelLight k = counted(10, 10);
  k.idle_before_ns = 1001;
  EXPECT_EQ(judge(k).bound, Bound::Launch);
  EXPECT_DOUBLE_EQ(judge(k).recoverable_ns, 1000 * 0.9 + 1001);
  k.idle_before_ns = 1000;
  EXPECT_EQ(judge(k).bound, Bound::Latency);
}

TEST(Verdict, OfACollectiveThatWaitedThenNamesTheStraggler) {
  KernelLight k;
  k.communication = true;
  k.total_ns = 1e6;
  k.wait_ns = 6e5;
  k.straggler = 3;
  const Verdict v = judge(k);
  EXPECT_EQ(v.bound, Bound::Wait);
  EXPECT_THAT(v.fix, HasSubstr("rank 3"));
  EXPECT_DOUBLE_EQ(v.recoverable_ns, 6e5);
  k.wait_ns = 5e5;
  EXPECT_EQ(judge(k).bound, Bound::Communication);
}

TEST(Verdict, WithoutNumbersThenUnknownAndNothingPromised) {
  KernelLight k;
  k.total_ns = 500;
  EXPECT_EQ(judge(k).bound, Bound::Unknown);
  EXPECT_EQ(judge(k).recoverable_ns, 0);
}

TEST(Verdict, OfASmallGridThenTheFixHasItsNumbers) {
  KernelLight k = counted(5, 5);
  k.waves = 0.25;
  k.occupancy_percent = 25;
  k.occupancy_limit = "registers";
  EXPECT_THAT(judge(k).fix, HasSubstr("25 % of the device"));
  EXPECT_THAT(judge(k).fix, HasSubstr("limited by registers"));
}

TEST(Ladder, WhenBetterRungsAreRefusedThenLabelAndReasonsAreTold) {
  const std::vector<Rung> rungs{{Source::Modelled, true, ""},
                                {Source::Sampled, false, "HARDWARE_BUSY"},
                                {Source::Measured, false, "INSUFFICIENT_PRIVILEGES"}};
  const LadderChoice c = choose_source(rungs);
  EXPECT_EQ(c.source, Source::Modelled);
  EXPECT_EQ(c.text,
            "speed of light: modelled (FLOPs and bytes of the operator); not measured (range profiler): "
            "INSUFFICIENT_PRIVILEGES; "
            "not sampled (PM sampling): HARDWARE_BUSY");
}
TEST(Ladder, WhenAllIsOpenThenMeasuredAndNoReasons) {
  const std::vector<Rung> rungs{{Source::Sampled, true, ""}, {Source::Measured, true, ""}};
  EXPECT_EQ(choose_source(rungs).text, "speed of light: measured (range profiler)");
}
TEST(Ladder, WithoutRungsThenTimeOnly) { EXPECT_EQ(choose_source({}).source, Source::TimeOnly); }

TEST(CounterError, OfPrivilegesThenQuotesTheDriver) {
  const std::string text = explain_counter_error(35, "Other: 1\nRmProfilingAdminOnly: 1\nMore: 2\n");
  EXPECT_THAT(text, HasSubstr("'RmProfilingAdminOnly: 1'"));
  EXPECT_THAT(text, HasSubstr("NVreg_RestrictProfilingToAdminUsers=0"));
  EXPECT_THAT(explain_counter_error(35, ""), Not(HasSubstr("driver says")));
  EXPECT_THAT(explain_counter_error(26, ""), HasSubstr("dcgmi profile --pause"));
  EXPECT_THAT(explain_counter_error(77, ""), HasSubstr("77"));
}

TEST(CounterPlan, OfKernelReplayWithCollectivesThenRefused) {
  CounterRequest r{"ncu", 9, false, 8, 24};
  const CounterPlan refused = plan_counters(r);
  EXPECT_FALSE(refused.allowed);
  EXPECT_THAT(refused.reason, HasSubstr("24 collectives"));
  r.passes = 1;  // nothing is replayed
  EXPECT_TRUE(plan_counters(r).allowed);
  r = {"ncu", 9, false, 1, 24};  // alone: no peers
  EXPECT_TRUE(plan_counters(r).allowed);
}
TEST(CounterPlan, ByStepsThenOnePassAStep) {
  const CounterPlan plan = plan_counters({"ncu", 9, true, 8, 24});
  EXPECT_TRUE(plan.allowed);
  EXPECT_EQ(plan.steps, 9);
  EXPECT_FALSE(plan_counters({"V2", 0, true, 1, 0}).allowed);
}

TEST(Counters, OfTheVerdictSetThenMeansAreWeightedByTime) {
  KernelLight k;
  k.count = 4;
  const CounterValues quick{{metric::kTime, 100}, {metric::kTensor, 20},     {metric::kIssue, 40},
                            {metric::kDram, 10},  {metric::kDramRead, 1000}, {metric::kDramWrite, 500},
                            {metric::kWarps, 50}, {metric::kL2Bytes, 1000}};
  CounterValues slow = quick;
  slow[metric::kTime] = 300;
  slow[metric::kTensor] = 80;
  slow[metric::kDram] = 50;
  Ceilings roofs;
  roofs.l2_bytes_per_s = 20e9;
  apply_counters(k, std::vector{quick, slow}, Source::Measured, roofs);
  EXPECT_EQ(k.source, Source::Measured);
  EXPECT_DOUBLE_EQ(*k.compute_percent, (40 * 100 + 80 * 300) / 400.0);
  EXPECT_DOUBLE_EQ(*k.memory_percent, (10 * 100 + 50 * 300) / 400.0);
  EXPECT_DOUBLE_EQ(*k.bytes, 2 * 1500 * 2);  // two of four were counted
  EXPECT_DOUBLE_EQ(*k.occupancy_percent, 50);
  EXPECT_NEAR(*k.l2_percent, (50 * 100 + 16.6666667 * 300) / 400, 1e-6);
  EXPECT_FALSE(k.flops.has_value());
}
TEST(Counters, OfTheRooflineSetThenFlopsAreSummed) {
  KernelLight k;
  k.count = 1;
  apply_counters(k,
                 std::vector<CounterValues>{{{metric::kBf16Ops, 1000},
                                             {metric::kDramBytes, 10},
                                             {metric::kTensor, 1},
                                             {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", 7}}},
                 Source::Measured, {});
  EXPECT_DOUBLE_EQ(*k.flops, 1014);
  EXPECT_DOUBLE_EQ(*k.bytes, 10);
}
TEST(Counters, WithoutVerdictMetricsThenTheModelStays) {
  KernelLight k = counted(1, 2);
  k.source = Source::Modelled;
  apply_counters(k, std::vector<CounterValues>{{{metric::kTime, 5}}}, Source::Measured, {});
  EXPECT_EQ(k.source, Source::Modelled);
}

TEST(Ranges, WhenSequencesDifferThenRefused) {
  const std::vector<CounterValues> ranges{{{"a", 1}}, {{"a", 2}}, {{"a", 3}}};
  const std::vector<std::string> names{"x", "y", "x"};
  const CountersByKernel joined = join_ranges(ranges, names);
  ASSERT_EQ(joined.at("x").size(), 2U);
  EXPECT_EQ(joined.at("x")[1].at("a"), 3);
  EXPECT_THROW(static_cast<void>(join_ranges(ranges, std::vector<std::string>{"x"})), UsageError);
}

TEST(Samples, OverKernelsThenWeightedByTheTimeShared) {
  Schedule s(0, 1000);
  s.kernel("long", 50, 250);
  s.kernel("short", 300, 310);
  std::vector<CounterSample> samples;
  for (int i = 0; i < 10; ++i) samples.push_back({kBase + 100 * i, kBase + 100 * (i + 1), {{metric::kDram, 10.0 * i}}});
  std::vector<std::string> too_short;
  const CountersByKernel c = attribute_samples(samples, s.trace, 0, too_short);
  ASSERT_EQ(c.count("long"), 1U);
  EXPECT_DOUBLE_EQ(c.at("long")[0].at(metric::kDram), (0 * 50 + 10 * 100 + 20 * 50) / 200.0);
  EXPECT_THAT(too_short, ::testing::ElementsAre("short"));
}

TEST(CountersOfAStep, InLaunchOrderThenOnlyTheFirstStepCounts) {
  Schedule s(0, 1000);
  s.step(0, 0, 100);
  s.step(1, 100, 200);
  s.kernel("b", 50, 60, 20);
  s.kernel("a", 30, 40, 10);
  s.kernel("a", 150, 160, 110);
  EXPECT_THAT(launch_order(s.trace, 0), ::testing::ElementsAre("a", "b"));
  const std::vector<CounterValues> ranges{{{metric::kDram, 1}}, {{metric::kDram, 2}}};
  const Counters c = counters_of_step(s.trace, ranges, {});
  EXPECT_EQ(c.source, Source::Measured);
  EXPECT_EQ(c.by_kernel.at("a")[0].at(metric::kDram), 1);
  EXPECT_EQ(c.by_kernel.at("b")[0].at(metric::kDram), 2);
}
TEST(CountersOfSamples, WhenEveryKernelIsTooShortThenTheRungIsClosed) {
  Schedule s(0, 1000);
  s.kernel("a", 30, 40, 10);
  const std::vector<CounterSample> samples{{kBase, kBase + 500, {{metric::kDram, 1}}}};
  const Counters c = counters_of_samples(s.trace, samples, {{Source::Sampled, true, ""}});
  EXPECT_EQ(choose_source(c.rungs).source, Source::TimeOnly);
  EXPECT_THAT(choose_source(c.rungs).text, HasSubstr("all 1 kernels are shorter"));
}

TEST(CollectiveWaits, OverRanksThenTheLateOneIsNamed) {
  std::vector<Trace> ranks(3);
  const int64_t durations[3][2] = {{100, 50}, {90, 50}, {20, 50}};  // rank 2 comes last to the first one
  for (int r = 0; r < 3; ++r) {
    ranks[r].rank = r;
    for (int q = 0; q < 2; ++q) {
      Collective c;
      c.comm = "shard";
      c.op = "all_gather";
      c.label = "layers.0";
      c.sequence = q;
      c.start_ns = kBase;
      c.end_ns = kBase + durations[r][q];
      ranks[r].collectives.push_back(c);
    }
  }
  const auto waits = collective_waits(ranks);
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].calls, 2);
  EXPECT_EQ(waits[0].wait_ns, 80 + 70);
  EXPECT_EQ(waits[0].straggler, 2);
  EXPECT_TRUE(collective_waits(std::span(ranks).first(1)).empty());
}

TEST(Roofline, OfAKnownKernelThenThePointIsExact) {
  KernelLight k = counted(0, 0);
  k.total_ns = 1e6;
  k.flops = 2e11;  // 200 TFLOP/s
  k.bytes = 4e9;   // 50 FLOP/B
  const Ceilings roofs{800e12, 4e12, 0, "test"};
  EXPECT_DOUBLE_EQ(roofs.ridge(), 200);
  const auto p = roofline_point(k, roofs);
  ASSERT_TRUE(p.has_value());
  EXPECT_DOUBLE_EQ(p->intensity, 50);
  EXPECT_DOUBLE_EQ(p->flops_per_s, 200e12);
  EXPECT_DOUBLE_EQ(p->roof_flops_per_s, 200e12);
  EXPECT_DOUBLE_EQ(p->fraction, 1);
  EXPECT_TRUE(p->memory_side);
  EXPECT_FALSE(roofline_point(k, {}).has_value());
  k.flops.reset();
  EXPECT_FALSE(roofline_point(k, roofs).has_value());
}

TEST(Model, OfAMatrixProductThenBytesAreInputsAndResult) {
  CpuOp op;
  op.name = "aten::addmm";
  op.shapes = "[[30], [10, 20], [20, 30], []]";
  op.dtypes = "['float', 'c10::BFloat16', 'c10::BFloat16', '']";
  EXPECT_DOUBLE_EQ(model_bytes(op), 30 * 4 + 200 * 2 + 600 * 2 + 300 * 2);
  op.name = "aten::add";
  op.shapes = "[[8, 4], [4]]";
  op.dtypes = "['float', 'float']";
  EXPECT_DOUBLE_EQ(model_bytes(op), (32 + 4 + 32) * 4);
  op.shapes = "";
  EXPECT_DOUBLE_EQ(model_bytes(op), 0);
  op.shapes = "[[not json";
  EXPECT_DOUBLE_EQ(model_bytes(op), 0);
}

TEST(Occupancy, OfAHopperKernelThenTheLimitIsNamed) {
  Device d;
  d.warp_size = 32;
  d.max_threads_per_sm = 2048;
  d.registers_per_sm = 65536;
  d.shared_per_sm = 233472;
  Kernel k;
  k.block[0] = 256;
  k.registers = 128;
  Occupancy o = occupancy(k, d);
  EXPECT_EQ(o.blocks, 2);
  EXPECT_DOUBLE_EQ(o.percent, 25);
  EXPECT_EQ(o.limit, "registers");
  k.registers = 32;
  o = occupancy(k, d);
  EXPECT_EQ(o.blocks, 8);
  EXPECT_EQ(o.limit, "threads");
  k.shared_memory = 100 * 1024;
  o = occupancy(k, d);
  EXPECT_EQ(o.blocks, 2);
  EXPECT_EQ(o.limit, "shared memory");
}

TEST(SpeedOfLight, WithShapesAndRoofsThenModelledPercentagesAreExact) {
  Schedule s(0, 10'000);
  const int op = s.op("aten::mm", 0, 10);
  s.trace.cpu_ops[op].flops = 2e6;
  s.trace.cpu_ops[op].shapes = "[[100, 100], [100, 100]]";
  s.trace.cpu_ops[op].dtypes = "['float', 'float']";
  s.trace.kernels[s.kernel("gemm", 100, 1100)].op = op;  // 1 µs: 2 TFLOP/s, 120 GB/s
  s.kernel("mystery", 2000, 2500);
  s.gather("layers.0", 3000, 4000);
  const Ceilings roofs{8e12, 0.24e12, 0, "test"};
  const auto rows = speed_of_light(s.trace, s.analysis(), roofs);
  ASSERT_EQ(rows.size(), 3U);
  const auto row = [&](const std::string& name) {
    return *std::find_if(rows.begin(), rows.end(), [&](auto& r) { return r.name.starts_with(name); });
  };
  EXPECT_EQ(row("gemm").source, Source::Modelled);
  EXPECT_NEAR(*row("gemm").compute_percent, 25, 1e-9);
  EXPECT_NEAR(*row("gemm").memory_percent, 50, 1e-9);
  EXPECT_EQ(row("gemm").op, "aten::mm");
  EXPECT_EQ(row("mystery").source, Source::TimeOnly);
  EXPECT_FALSE(row("mystery").compute_percent.has_value());
  EXPECT_TRUE(row("nccl").communication);
}

TEST(SpeedOfLight, WithCountersThenTheyWin) {
  Schedule s(0, 10'000);
  s.kernel("gemm", 100, 1100, 0);
  Counters counters;
  counters.source = Source::Sampled;
  counters.by_kernel["gemm"] = {{{metric::kTensor, 90}, {metric::kGpuDram, 20}}};
  const auto rows = speed_of_light(s.trace, s.analysis(), {}, counters);
  EXPECT_EQ(rows[0].source, Source::Sampled);
  EXPECT_EQ(judge(rows[0]).bound, Bound::Compute);
}

TEST(DataSheet, OfKnownDevicesThenRoofsElseUnknown) {
  EXPECT_DOUBLE_EQ(data_sheet_ceilings("NVIDIA H200").bytes_per_s, 4.8e12);
  EXPECT_FALSE(data_sheet_ceilings("Some GPU").known());
}

}  // namespace
}  // namespace fsdpp::profiler::testing

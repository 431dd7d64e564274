#include <gmock/gmock.h>

#include <numeric>
#include <random>

#include "analysis_schedule.h"
#include "profiler/analysis_intervals.h"

namespace fsdpp::profiler::testing {
namespace {

using Category = MemoryEvent::Category;
using ::testing::ElementsAre;
using ::testing::Pair;

TEST(Intervals, WhenSubtractedAndIntersectedThenPartsAreExact) {
  const Intervals a = merged({{10, 20}, {0, 5}, {18, 30}, {7, 7}, {9, 3}});
  EXPECT_EQ(a, (Intervals{{0, 5}, {10, 30}}));
  const Intervals b = merged({{3, 12}, {15, 16}, {29, 40}});
  EXPECT_EQ(subtract(a, b), (Intervals{{0, 3}, {12, 15}, {16, 29}}));
  EXPECT_EQ(intersect(a, b), (Intervals{{3, 5}, {10, 12}, {15, 16}, {29, 30}}));
  EXPECT_EQ(length(a), 25);
}

TEST(Window, WithStepsThenReachesToTheLateEndOfTheDevice) {
  Schedule s(0, 1000);
  s.step(3, 100, 200);
  s.kernel("gemm", 150, 260);
  const Window w = analysis_window(s.trace);
  EXPECT_EQ(w.start_ns, kBase + 100);
  EXPECT_EQ(w.end_ns, kBase + 260);
}

TEST(SplitTime, WhenThingsOverlapThenEveryInstantHasOneOwner) {
  Schedule s(0, 100);
  s.kernel("gemm", 10, 40);
  s.kernel("gemm", 30, 50, -1, 8);  // beside the first
  s.gather("a", 35, 70);            // 15 hidden, 20 exposed
  s.copy(60, 80);                   // 10 beside communication, 10 alone
  const TimeSplit t = s.analysis().split;
  EXPECT_EQ(t.window_ns, 100);
  EXPECT_EQ(t.compute_ns, 40);
  EXPECT_EQ(t.communication_ns, 35);
  EXPECT_EQ(t.exposed_ns, 20);
  EXPECT_EQ(t.copy_ns, 10);
  EXPECT_EQ(t.idle_ns, 30);
  EXPECT_DOUBLE_EQ(t.overlap().value(), 15.0 / 35.0);
}

TEST(SplitTime, WithoutCommunicationThenThereIsNoOverlap) {
  Schedule s(0, 10);
  s.kernel("gemm", 0, 10);
  EXPECT_FALSE(s.analysis().split.overlap().has_value());
}

TEST(ExposedCommunication, PerUnitThenSumsToTheTotal) {
  Schedule s(0, 200);
  s.gather("layers.0", 0, 30);   // exposed 0..30
  s.gather("layers.1", 20, 60);  // from 30 its own: 30..40 exposed
  s.kernel("gemm", 40, 100);
  s.collective("reduce_scatter", "layers.1", s.kernel("ncclDevKernel_ReduceScatter", 90, 125), 2048);
  s.gather("layers.0", 120, 130);  // the reduction started first: 125..130 remain
  const Analysis a = s.analysis();
  ASSERT_EQ(a.units.size(), 2U);
  EXPECT_EQ(a.units[0].unit, "layers.0");
  EXPECT_EQ(a.units[0].exposed_ns, 30 + 5);
  EXPECT_EQ(a.units[0].total_ns, 30 + 10);
  EXPECT_EQ(a.units[0].calls, 2);
  EXPECT_EQ(a.units[0].bytes, 2048);
  EXPECT_EQ(a.units[1].exposed_ns, 10 + 25);
  EXPECT_THAT(a.units[1].exposed_by_op, ElementsAre(Pair("all_gather", 10), Pair("reduce_scatter", 25)));
  EXPECT_EQ(a.units[0].exposed_ns + a.units[1].exposed_ns, a.split.exposed_ns);
}

TEST(ExposedCommunication, OfACopyEngineThenCountsWithoutAKernel) {
  Schedule s(0, 100);
  Collective& c = s.collective("all_gather", "embed", -1, 64);
  c.start_ns = kBase + 10;
  c.end_ns = kBase + 50;
  s.kernel("gemm", 40, 60);
  s.copy(10, 50);
  const Analysis a = s.analysis();
  EXPECT_EQ(a.split.exposed_ns, 30);
  EXPECT_EQ(a.split.copy_ns, 0);
  ASSERT_EQ(a.units.size(), 1U);
  EXPECT_EQ(a.units[0].unit, "embed");
}

TEST(ExposedCommunication, WithoutLabelThenTheScopeNamesTheUnit) {
  Schedule s(0, 100);
  const int outer = s.scope(trace::Kind::Unshard, "layers.7", 0, 5);
  const int inner = s.scope(trace::Kind::User, "", 1, 4);
  s.trace.scopes[inner].parent = outer;
  s.trace.kernels[s.kernel("ncclDevKernel_AllGather", 10, 20)].scope = inner;
  s.kernel("ncclDevKernel_AllReduce", 30, 34);
  const Analysis a = s.analysis();
  ASSERT_EQ(a.units.size(), 2U);
  EXPECT_EQ(a.units[0].unit, "layers.7");
  EXPECT_EQ(a.units[1].unit, "(no unit)");
  EXPECT_EQ(a.units[1].exposed_ns, 4);
}

TEST(ExposedCommunication, OfRandomSchedulesThenSumsAreExact) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Schedule s(0, 1000);
    for (int i = 0; i < 30; ++i) {
      const int64_t start = static_cast<int64_t>(random() % 1100) + 1;
      const int64_t end = start + static_cast<int64_t>(random() % 60);
      if (random() % 2 != 0) {
        s.gather("u" + std::to_string(random() % 5), start, end, start - 1);
      } else {
        s.kernel("gemm", start, end, start - 1);
      }
    }
    const Analysis a = s.analysis();
    int64_t units = 0;
    for (const UnitCommunication& u : a.units) units += u.exposed_ns;
    ASSERT_EQ(units, a.split.exposed_ns);
    ASSERT_EQ(std::accumulate(a.idle_ns.begin(), a.idle_ns.end(), int64_t{0}), 1000 - a.split.compute_ns);
    ASSERT_EQ(idle(a, IdleCause::Communication), a.split.exposed_ns);
    int64_t end = 0;
    for (const IdlePiece& p : a.idle) {  // pieces do not overlap
      ASSERT_GE(p.start_ns, end);
      ASSERT_GT(p.end_ns, p.start_ns);
      end = p.end_ns;
    }
  }
}

TEST(Idle, WhenTheHostLaunchesLateThenLaunchBoundUpToTheCall) {
  Schedule s(0, 100);
  s.kernel("a", 0, 20, 0);
  const int late = s.kernel("b", 60, 100, 50);  // the call returns at 52
  s.trace.kernels[late].op = s.op("aten::mm", 40, 55);
  const Analysis a = s.analysis();
  EXPECT_EQ(idle(a, IdleCause::LaunchBound), 52 - 20);
  EXPECT_EQ(idle(a, IdleCause::Dispatch), 60 - 52);
  EXPECT_EQ(a.gaps.count, 1);
  EXPECT_EQ(a.gaps.total_ns, 32);
  ASSERT_EQ(a.gaps.longest.size(), 1U);
  EXPECT_EQ(a.gaps.longest[0].kernel, "b");
  EXPECT_EQ(a.gaps.longest[0].op, "aten::mm");
  EXPECT_THAT(a.gaps.by_op, ElementsAre(Pair("aten::mm", 32)));
}

TEST(Idle, WhenLaunchedAheadThenOnlyDispatch) {
  Schedule s(0, 100);
  s.kernel("a", 0, 50, 0);
  s.kernel("b", 53, 100, 10);
  const Analysis a = s.analysis();
  EXPECT_EQ(idle(a, IdleCause::Dispatch), 3);
  EXPECT_EQ(idle(a, IdleCause::LaunchBound), 0);
  EXPECT_EQ(a.gaps.count, 0);
}

TEST(Idle, InsideALoaderScopeThenDataLoaderOnlyOnTheLaunchingThread) {
  Schedule s(0, 100);
  s.kernel("a", 0, 20, 0);
  s.scope(trace::Kind::Loader, "next", 10, 45);
  s.scope(trace::Kind::Loader, "worker", 0, 100, 555);
  s.kernel("b", 60, 100, 58);
  const Analysis a = s.analysis();
  EXPECT_EQ(idle(a, IdleCause::DataLoader), 25);
  EXPECT_EQ(idle(a, IdleCause::LaunchBound), 15);
}

TEST(Idle, AfterTheHostWaitedForTheDeviceThenSynchronisation) {
  Schedule s(0, 100);
  s.kernel("a", 0, 20, 0);
  s.call("cudaStreamSynchronize", 5, 23);
  s.kernel("b", 40, 100, 35);
  const Analysis a = s.analysis();
  EXPECT_EQ(idle(a, IdleCause::Synchronisation), 37 - 20);  // the wait's tail and the empty queue after it
  EXPECT_EQ(idle(a, IdleCause::Dispatch), 3);
  EXPECT_EQ(idle(a, IdleCause::LaunchBound), 0);
}

TEST(Idle, WhenAWaitEndedBeforeTheGapThenItIsNotToBlame) {
  Schedule s(0, 100);
  s.kernel("a", 0, 20, 0);
  s.call("cudaStreamSynchronize", 5, 18);
  s.kernel("b", 40, 100, 35);
  EXPECT_EQ(idle(s.analysis(), IdleCause::LaunchBound), 17);
}

TEST(Idle, OfEveryOtherCauseThenNamed) {
  Schedule s(0, 1000);
  s.kernel("a", 0, 100, 0);
  s.call("cudaMalloc", 120, 150);
  s.overhead("COMMAND_BUFFER_FULL", 160, 170);
  s.overhead("LAZY_FUNCTION_LOADING", 180, 200);
  s.overhead("CUPTI_BUFFER_FLUSH", 200, 205);
  Collective& host = s.collective("all_gather", "u", -1);
  host.on_device = false;
  host.start_ns = kBase + 210;
  host.end_ns = kBase + 250;
  s.kernel("b", 300, 400, 290);
  s.copy(450, 470);
  s.kernel("c", 470, 500);
  s.gather("u", 500, 530, 290);
  const Analysis a = s.analysis();
  EXPECT_EQ(idle(a, IdleCause::Allocation), 30);
  EXPECT_EQ(idle(a, IdleCause::QueueFull), 10);
  EXPECT_EQ(idle(a, IdleCause::ModuleLoading), 20);
  EXPECT_EQ(idle(a, IdleCause::Profiler), 5);
  EXPECT_EQ(idle(a, IdleCause::Communication), 40 + 30);
  EXPECT_EQ(idle(a, IdleCause::LaunchBound), 192 - 30 - 10 - 20 - 5 - 40);
  EXPECT_EQ(idle(a, IdleCause::Dispatch), 8);
  EXPECT_EQ(idle(a, IdleCause::Copy), 20);
  EXPECT_EQ(idle(a, IdleCause::Other), 50 + 470);  // before the copy and after the end nothing is known
  EXPECT_EQ(a.queue.full_ns, 10);
  EXPECT_EQ(a.queue.full_count, 1);
}

TEST(LaunchQueue, WhenTheHostRunsAheadThenDepthIsCounted) {
  Schedule s(0, 100);
  s.kernel("a", 10, 30, 0);
  s.kernel("b", 30, 50, 2);
  s.kernel("c", 50, 60, 4);   // three waiting at 4
  s.kernel("d", 60, 70, 55);  // alone
  const LaunchQueue q = s.analysis().queue;
  EXPECT_EQ(q.max_depth, 3);
  EXPECT_DOUBLE_EQ(q.mean_depth, (1 + 2 + 3 + 1) / 4.0);
}

TEST(LoaderWait, WithStepsThenOnlyTheirThreadCounts) {
  Schedule s(0, 1000);
  s.step(0, 0, 500);
  s.step(1, 500, 1000);
  s.scope(trace::Kind::Loader, "next", 100, 150);
  s.scope(trace::Kind::Loader, "next", 480, 520);
  s.scope(trace::Kind::Loader, "worker", 0, 900, 555);
  const Analysis a = s.analysis();
  EXPECT_EQ(a.loader.total_ns, 90);
  EXPECT_EQ(a.loader.longest_ns, 50);
  EXPECT_EQ(a.loader.count, 2);
  EXPECT_EQ(a.loader.prepare_count, 1);
  EXPECT_EQ(a.loader.prepare_ns, 900);
  EXPECT_EQ(a.loader.starved_ns, 90);
  ASSERT_EQ(a.steps.size(), 2U);
  EXPECT_EQ(a.steps[0].loader_ns, 70);
  EXPECT_EQ(a.steps[1].loader_ns, 20);
}

TEST(LoaderWait, WhileLoaderThreadsPrepareThenThatPartIsStarved) {
  Schedule s(0, 1000);
  s.step(0, 0, 1000);
  s.scope(trace::Kind::Loader, "next", 100, 200);
  s.scope(trace::Kind::Loader, "prepare", 50, 130, 555);
  s.scope(trace::Kind::Loader, "prepare", 120, 150, 556);  // two threads at once count once
  s.scope(trace::Kind::Loader, "prepare", 300, 400, 555);
  const LoaderWait wait = s.analysis().loader;
  EXPECT_EQ(wait.total_ns, 100);
  EXPECT_EQ(wait.starved_ns, 50);
  EXPECT_EQ(wait.prepare_ns, 80 + 30 + 100);
  EXPECT_EQ(wait.prepare_count, 3);
}

TEST(Steps, WhenWorkCrossesTheBorderThenItIsTheFirstOnes) {
  Schedule s(0, 200);
  s.step(4, 0, 100);
  s.step(5, 100, 200);
  s.kernel("gemm", 50, 130);  // its launch has no record, but it was before 50
  s.gather("u", 120, 150);
  const Analysis a = s.analysis();
  ASSERT_EQ(a.steps.size(), 2U);
  EXPECT_EQ(a.steps[0].step, 4);
  EXPECT_EQ(a.steps[0].split.compute_ns, 80);
  EXPECT_EQ(a.steps[1].start_ns, kBase + 130);
  EXPECT_EQ(a.steps[1].split.compute_ns, 0);
  EXPECT_EQ(a.steps[1].split.exposed_ns, 20);
  EXPECT_EQ(a.steps[1].split.idle_ns, 50);
}

// Ten for the host, 73 for the device: steps 0 … 3 are launched while the device is in the first one.
Schedule host_ahead() {
  Schedule s(0, 400);
  for (int i = 0; i < 4; ++i) {
    s.step(i, 10 * i, 10 * i + 10);
    s.kernel("gemm", 4 + 73 * i, 44 + 73 * i, 10 * i + 2);
    s.kernel("add", 44 + 73 * i, 77 + 73 * i, 10 * i + 6, i % 2 == 0 ? 7 : 8);
  }
  return s;
}

TEST(Steps, WhenTheHostRunsAheadThenEachTakesAsLongAsTheDeviceDoes) {
  const Analysis a = host_ahead().analysis();
  EXPECT_EQ(a.window.start_ns, kBase + 4);
  EXPECT_EQ(a.window.length(), 4 * 73);
  ASSERT_EQ(a.steps.size(), 4U);
  for (const StepTime& s : a.steps) {
    EXPECT_EQ(s.start_ns, kBase + 4 + 73 * s.step);
    EXPECT_EQ(s.split.window_ns, 73) << s.step;
    EXPECT_EQ(s.split.compute_ns, 73) << s.step;
  }
}

TEST(Steps, WhenTheHostRunsAheadThenItsLoaderWaitsAndLaunchesStillCount) {
  Schedule s = host_ahead();
  s.scope(trace::Kind::Loader, "next", 0, 2);
  s.scope(trace::Kind::Loader, "next", 30, 33);
  const Analysis a = s.analysis();
  EXPECT_EQ(a.loader.total_ns, 5);
  EXPECT_EQ(a.steps[0].loader_ns, 2);
  EXPECT_EQ(a.steps[3].loader_ns, 3);
  EXPECT_EQ(a.queue.max_depth, 7);  // of eight the first has started
}

TEST(Steps, AfterWorkLaunchedBeforeTheFirstThenItBeginsWithTheEndOfThat) {
  Schedule s = host_ahead();
  s.kernel("gemm of the step before", -60, 4, -70);
  s.trace.kernels[0].start_ns += 1;  // the device was late by itself
  EXPECT_EQ(s.analysis().window.start_ns, kBase + 5);
  s.trace.kernels.back().end_ns = s.trace.kernels[0].start_ns + 10;
  EXPECT_EQ(s.analysis().window.start_ns, kBase + 15);
}

TEST(Steps, WhenTheDeviceWaitsForTheHostThenTheyAreTheHosts) {
  Schedule s(0, 300);
  for (int i = 0; i < 3; ++i) {  // the host loads for 70 and marks a step's end before the device's 28 are over
    s.step(i, 75 * i, 75 * i + 75);
    s.scope(trace::Kind::Loader, "next", 75 * i, 75 * i + 70);
    s.kernel("gemm", 75 * i + 72, 75 * i + 100, 75 * i + 71);
  }
  const Analysis a = s.analysis();
  EXPECT_EQ(a.window.start_ns, kBase);
  EXPECT_EQ(a.window.end_ns, kBase + 250);
  EXPECT_EQ(a.steps[0].split.window_ns, 100);
  EXPECT_EQ(a.steps[1].split.window_ns, 75);
  EXPECT_EQ(a.steps[2].split.window_ns, 75);
  EXPECT_EQ(idle(a, IdleCause::DataLoader), 70 + 45 + 45);
}

TEST(Steps, WorkLaunchedAfterTheLastThenIsNotItsOwn) {
  Schedule s = host_ahead();
  s.kernel("evaluation", 296, 350, 45);
  const Analysis a = s.analysis();
  EXPECT_EQ(a.window.length(), 4 * 73);
  EXPECT_EQ(a.split.idle_ns, 0);
}

TEST(TopKernels, ByTotalTimeThenSharesAndExtremesAreExact) {
  Schedule s(0, 1000);
  s.kernel("small", 0, 10);
  s.kernel("gemm", 10, 110);
  s.kernel("gemm", 200, 350);
  s.gather("u", 400, 440);
  const auto rows = top_kernels(s.trace, 0, analysis_window(s.trace), 2);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].name, "gemm");
  EXPECT_EQ(rows[0].count, 2);
  EXPECT_EQ(rows[0].total_ns, 250);
  EXPECT_EQ(rows[0].min_ns, 100);
  EXPECT_EQ(rows[0].max_ns, 150);
  EXPECT_EQ(rows[0].example, 2);
  EXPECT_DOUBLE_EQ(rows[0].share, 250.0 / 300.0);
  EXPECT_FALSE(rows[0].communication);
  EXPECT_TRUE(rows[1].communication);
}

TEST(Memory, HeldSinceBeforeTheWindowThenUnderWhatTheProgramSaid) {
  Schedule s(0, 100);
  s.memory(0, 0x1, 300, Category::Parameters);
  s.memory(0, 0x2, 150, Category::Optimizer);
  for (MemoryEvent& e : s.trace.memory) e.before = true, e.total_bytes = 0;
  s.memory(1, 0xA, 100, Category::Activations, -1, 600);  // so 500 were there before, 50 of them unaccounted for
  s.memory(2, 0x2, -150, Category::Other, -1, 450);
  const MemoryTimeline g = memory_timeline(s.trace, 0);
  EXPECT_EQ(g.bytes_before, 50);
  EXPECT_THAT(g.peak.bytes, ElementsAre(300, 0, 0, 100, 150, 50));
  EXPECT_THAT(g.points.back().bytes, ElementsAre(300, 0, 0, 100, 0, 50));
  ASSERT_FALSE(g.owners.empty());
  EXPECT_EQ(g.owners[0].owner, "(before the window)");
}

TEST(Memory, AtThePeakThenCategoriesAndOwnersAreExact) {
  Schedule s(0, 100);
  const int layer = s.scope(trace::Kind::Unshard, "layers.3", 0, 100);
  s.memory(1, 0xA, 100, Category::Parameters, -1, 600);  // 500 were there before
  s.memory(2, 0xB, 50, Category::Gathered, layer, 650);
  s.memory(3, 0xC, 70, Category::Activations, layer, 720);
  s.memory(4, 0xB, -50, Category::Other, -1, 670);  // leaves "gathered", whatever it says
  s.memory(5, 0xD, 10, Category::Gathered, layer, 680);
  const MemoryTimeline m = s.analysis().memory;
  EXPECT_EQ(m.device, kHostDevice);  // no kernel: nothing ran on the GPU
  const MemoryTimeline g = memory_timeline(s.trace, 0);
  EXPECT_EQ(g.bytes_before, 500);
  EXPECT_EQ(g.peak.time_ns, kBase + 3);
  EXPECT_EQ(g.peak.total(), 720);
  EXPECT_THAT(g.peak.bytes, ElementsAre(100, 0, 50, 70, 0, 500));
  ASSERT_EQ(g.owners.size(), 3U);
  EXPECT_EQ(g.owners[0].bytes, 100);
  EXPECT_EQ(g.owners[1].owner, "layers.3");
  EXPECT_EQ(g.owners[1].category, Category::Activations);
  ASSERT_EQ(g.points.size(), 5U);
  EXPECT_THAT(g.points[4].bytes, ElementsAre(100, 0, 10, 70, 0, 500));
}

TEST(Memory, WhenThinnedThenThePeakStays) {
  Schedule s(0, 10'000);
  for (int i = 0; i < 1000; ++i) {
    s.memory(2 * i, 1, i == 777 ? 99 : 5, Category::Other);
    s.memory(2 * i + 1, 1, i == 777 ? -99 : -5, Category::Other);
  }
  const MemoryTimeline m = memory_timeline(s.trace, 0, 40);
  EXPECT_EQ(m.points.size(), 40U);
  EXPECT_EQ(m.peak.total(), 99);
  EXPECT_EQ(std::count_if(m.points.begin(), m.points.end(), [](auto& p) { return p.total() == 99; }), 1);
}

TEST(HostTrace, WithoutAGpuThenOperatorsComputeAndCollectivesBlockTheirThread) {
  Schedule s(0, 100);
  s.trace.has_cuda = false;
  s.op("autograd::Node", 0, 60);
  s.op("aten::mm", 0, 20, 0);
  Collective& c = s.collective("reduce_scatter", "layers.0", -1, 10);
  c.on_device = false;
  c.device = -1;
  c.start_ns = kBase + 20;
  c.end_ns = kBase + 50;
  s.scope(trace::Kind::Loader, "next", 60, 90);
  const Analysis a = s.analysis();
  EXPECT_EQ(a.device, kHostDevice);
  EXPECT_EQ(a.split.compute_ns, 30);
  EXPECT_EQ(a.split.exposed_ns, 30);
  EXPECT_EQ(idle(a, IdleCause::DataLoader), 30);
  EXPECT_EQ(idle(a, IdleCause::Other), 10);
  ASSERT_EQ(a.kernels.size(), 2U);
  EXPECT_EQ(a.kernels[0].name, "autograd::Node");
  EXPECT_EQ(a.kernels[0].total_ns, 40);
}

TEST(EmptyTrace, ThenEverythingIsZero) {
  const Analysis a = analyse(Trace{});
  EXPECT_EQ(a.split.window_ns, 0);
  EXPECT_TRUE(a.idle.empty());
  EXPECT_TRUE(a.kernels.empty());
}

}  // namespace
}  // namespace fsdpp::profiler::testing

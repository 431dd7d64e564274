#include "fsdpp/profiler/step_counters.h"

#include <gmock/gmock.h>

#include <deque>
#include <map>
#include <set>

#include "analysis_schedule.h"
#include "fsdpp/base/error.h"
#include "profiler/speed_of_light_metrics.h"

namespace fsdpp::profiler::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A device whose steps launch `kernels`; every range of set S has the metric "S" with the range's ordinal.
struct FakeDevice final : CounterDevice {
  struct Log {
    std::vector<std::string> kernels{"gemm", "copy", "gemm"};
    bool names = true;                      ///< launches can be seen
    std::set<std::string> refused, broken;  ///< sets that can't be opened; sets whose step fails
    std::map<std::string, int> passes;      ///< 1 if not named
    std::set<std::string> short_by_one;     ///< sets that lose a range
    std::vector<std::string> opened, begun;
    int open_now = 0;
    bool watching = false;
  };
  struct Ranges final : RangeCounters {
    Ranges(Log& log, std::string set) : log(log), set(std::move(set)) { ++log.open_now; }
    ~Ranges() override { --log.open_now; }
    void begin_step() override {
      log.begun.push_back(set);
      if (log.broken.contains(set)) throw ConfigError("the hardware is busy");
    }
    bool end_step() override { return ++pass >= (log.passes.contains(set) ? log.passes[set] : 1); }
    std::vector<CounterValues> ranges() override {
      std::vector<CounterValues> out;
      for (size_t i = log.short_by_one.contains(set) ? 1 : 0; i < log.kernels.size(); ++i)
        out.push_back({{set, static_cast<double>(i)}, {metric::kTime, 100}});
      return out;
    }
    int64_t dropped() const override { return 0; }
    Log& log;
    std::string set;
    int pass = 0;
  };

  explicit FakeDevice(Log& log) : log(log) {}
  std::unique_ptr<RangeCounters> open(const CounterRequest& request, int max_kernels) override {
    EXPECT_GE(max_kernels, 3);
    EXPECT_EQ(log.open_now, 0) << "two sets can't be open at once";
    log.opened.push_back(request.set);
    if (log.refused.contains(request.set)) throw ConfigError("no privileges for " + request.set);
    return std::make_unique<Ranges>(log, request.set);
  }
  void watch_launches() override { log.watching = true; }
  std::vector<std::string> launches() override {
    log.watching = false;
    return log.names ? log.kernels : std::vector<std::string>{};
  }
  Log& log;
};

Trace traced() {
  Schedule s(0, 100);
  s.step(0, 0, 100);
  s.kernel("first", 1, 10, 0);
  s.kernel("second", 11, 20, 2);
  s.kernel("third", 21, 30, 4);
  return s.trace;
}

Counters count(FakeDevice::Log& log, CounterOptions options, const Trace& trace, int steps = 100) {
  StepCounters counting(std::make_unique<FakeDevice>(log), trace, std::move(options));
  for (int i = 0; i < steps && !counting.done(); ++i) {
    counting.begin_step();
    counting.end_step();
  }
  return counting.take();
}
CounterOptions two_sets() { return {.sets = {"A", "B"}}; }

TEST(StepCounters, OfTwoSetsThenOneStepEachAndMetricsJoinedByOccurrence) {
  FakeDevice::Log log;
  const Counters c = count(log, two_sets(), traced());
  EXPECT_THAT(log.begun, ElementsAre("A", "B"));
  EXPECT_EQ(log.open_now, 0);
  EXPECT_FALSE(log.watching);
  ASSERT_EQ(c.by_kernel.size(), 2U);
  ASSERT_EQ(c.by_kernel.at("gemm").size(), 2U);
  EXPECT_EQ(c.by_kernel.at("gemm")[1].at("A"), 2);
  EXPECT_EQ(c.by_kernel.at("gemm")[1].at("B"), 2);
  EXPECT_EQ(c.by_kernel.at("copy")[0].at("A"), 1);
  ASSERT_EQ(c.rungs.size(), 1U);
  EXPECT_TRUE(c.rungs[0].usable);
  EXPECT_THAT(c.notes, IsEmpty());
}

TEST(StepCounters, OfASetOfThreePassesThenThreeStepsAndNothingReplayed) {
  FakeDevice::Log log;
  log.passes["A"] = 3;
  static_cast<void>(count(log, two_sets(), traced()));
  EXPECT_THAT(log.begun, ElementsAre("A", "A", "A", "B"));
}

TEST(StepCounters, WithoutNamesOfLaunchesThenThoseOfTheTracedStep) {
  FakeDevice::Log log;
  log.names = false;
  const Counters c = count(log, two_sets(), traced());
  EXPECT_EQ(c.by_kernel.size(), 3U);
  EXPECT_EQ(c.by_kernel.at("third")[0].at("A"), 2);
}

TEST(StepCounters, WhenNeitherNamesNorTheTraceFitThenTheRungSaysWhy) {
  FakeDevice::Log log;
  log.kernels = {"a", "b", "c", "d", "e"};
  log.short_by_one = {"A"};
  const Counters c = count(log, two_sets(), traced());
  EXPECT_THAT(c.by_kernel, IsEmpty());
  EXPECT_FALSE(c.rungs[0].usable);
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("did not launch the same sequence"));
  EXPECT_THAT(c.notes, ElementsAre(HasSubstr("4 ranges for 5 launches")));
}

TEST(StepCounters, WhenTheFirstSetIsRefusedThenNoStepIsCounted) {
  FakeDevice::Log log;
  log.refused = {"A"};
  const Counters c = count(log, two_sets(), traced());
  EXPECT_THAT(log.begun, IsEmpty());
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("no privileges for A"));
  EXPECT_THAT(choose_source(c.rungs).text,
              HasSubstr("speed of light: time only; not measured (range profiler): no privileges"));
}

TEST(StepCounters, WhenALaterSetIsRefusedThenOnlyItsMetricsAreMissing) {
  FakeDevice::Log log;
  log.refused = {"B"};
  const Counters c = count(log, {.sets = {"A", "B", "C"}}, traced());
  EXPECT_THAT(log.begun, ElementsAre("A", "C"));
  EXPECT_TRUE(c.rungs[0].usable);
  EXPECT_TRUE(c.by_kernel.at("gemm")[0].contains("C"));
  EXPECT_FALSE(c.by_kernel.at("gemm")[0].contains("B"));
  EXPECT_THAT(c.notes, ElementsAre(HasSubstr("B was not counted: ")));
}

TEST(StepCounters, WhenAStepFailsThenThatSetIsGivenUp) {
  FakeDevice::Log log;
  log.broken = {"A"};
  const Counters c = count(log, two_sets(), traced());
  EXPECT_THAT(log.begun, ElementsAre("A"));
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("busy"));
  EXPECT_EQ(log.open_now, 0);
}

TEST(StepCounters, WhenTheTrainingEndsEarlyThenWhatWasCountedStays) {
  FakeDevice::Log log;
  EXPECT_TRUE(count(log, two_sets(), traced(), 1).rungs[0].usable);
  const Counters none = count(log, two_sets(), traced(), 0);
  EXPECT_THAT(none.rungs[0].reason, HasSubstr("the training ended"));
  EXPECT_EQ(log.open_now, 0);
}

TEST(StepCounters, WhenForbiddenThenNothingIsOpened) {
  FakeDevice::Log log;
  CounterOptions options = two_sets();
  options.forbidden = "2 ranks share 1 GPUs";
  const Counters c = count(log, std::move(options), traced());
  EXPECT_THAT(log.opened, IsEmpty());
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("share"));
}

TEST(StepCounters, WhenAnotherRankCannotThenThisOneStopsTooAndNeedsTheAgreement) {
  FakeDevice::Log log;
  CounterOptions options = two_sets();
  options.world_size = 2;
  EXPECT_THROW(count(log, options, traced()), UsageError);
  int asked = 0;
  options.everywhere = [&](bool mine) { return mine && ++asked != 2; };  // the peer can't open the first set
  const Counters c = count(log, options, traced());
  EXPECT_THAT(log.begun, IsEmpty());
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("another rank"));
  EXPECT_EQ(log.open_now, 0);
}

TEST(StepCounters, TwoRanksOfWhichOneFailsAnywhereThenBothTakeTheSameSteps) {
  for (int fault = 0; fault < 3; ++fault) {
    FakeDevice::Log logs[2];
    if (fault == 0) logs[1].refused = {"B"};
    if (fault == 1) logs[1].broken = {"B"};
    if (fault == 2) logs[1].short_by_one = {"B"}, logs[1].names = false;
    // Both ranks in turn: the answers of rank 1, alone, are what rank 0 hears.
    std::deque<bool> answers;
    CounterOptions options{.sets = {"A", "B", "C"}};
    options.everywhere = [&](bool mine) { return answers.push_back(mine), mine; };
    static_cast<void>(count(logs[1], options, traced()));
    options.world_size = 2;
    options.everywhere = [&](bool mine) {
      EXPECT_FALSE(answers.empty()) << "rank 0 asks more often than rank 1";
      const bool both = mine && answers.front();
      answers.pop_front();
      return both;
    };
    const Counters c = count(logs[0], options, traced());
    EXPECT_TRUE(answers.empty()) << "fault " << fault;
    EXPECT_EQ(logs[0].begun, logs[1].begun) << "fault " << fault;
    EXPECT_TRUE(c.rungs[0].usable);
  }
}

TEST(Counters, AsBytesThenReadBackEqual) {
  FakeDevice::Log log;
  Counters c = count(log, {.sets = {"A", "B"}}, traced());
  c.notes = {"a \"note\""};
  c.rungs.push_back({Source::Sampled, false, "why"});
  const Counters back = counters_from_bytes(to_bytes(c));
  EXPECT_EQ(back.by_kernel, c.by_kernel);
  EXPECT_EQ(back.notes, c.notes);
  ASSERT_EQ(back.rungs.size(), 2U);
  EXPECT_EQ(back.rungs[1].reason, "why");
  EXPECT_EQ(back.source, Source::Measured);
  EXPECT_THROW(static_cast<void>(counters_from_bytes("{}")), Error);
  EXPECT_THROW(static_cast<void>(counters_from_bytes("no JSON")), Error);
}

TEST(Samples, OnAnotherClockThenTheRungSaysHowFarOff) {
  const Trace t = traced();
  const CounterSample sample{t.start_ns - 5'000, t.start_ns - 4'000, {{metric::kGpuDram, 50.0}}};
  const Counters c = counters_of_samples(t, std::span(&sample, 1), {{Source::Sampled, true, ""}});
  ASSERT_EQ(c.rungs.size(), 1U);
  EXPECT_FALSE(c.rungs[0].usable);
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("another clock"));
  EXPECT_THAT(c.rungs[0].reason, HasSubstr("-5000 ns"));
  EXPECT_THAT(counters_of_samples(t, {}, {}).rungs[0].reason, HasSubstr("no sample"));
}

TEST(Flops, WhenASetCountsNoneOfThisKindThenTheModelsStay) {
  KernelLight k;
  k.count = 1;
  k.total_ns = 100;
  k.flops = 7;
  const CounterValues values{{metric::kBf16Ops, 0}, {metric::kTensor, 1}, {metric::kDram, 2}};
  apply_counters(k, std::span(&values, 1), Source::Measured, {});
  EXPECT_EQ(k.flops, 7);
}

}  // namespace
}  // namespace fsdpp::profiler::testing

#include "fsdpp/profiler/counters.h"

#include <gmock/gmock.h>

#include "fsdpp/base/error.h"
#include "profiler/speed_of_light_metrics.h"

/// CUPTI's Profiler Host API needs no GPU: names and pass counts of every set are checked here, on every chip that we
/// name.
namespace fsdpp::profiler {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

const std::string kLibrary = FSDPP_CUPTI_LIBRARY;
constexpr const char* kSets[] = {"V1", "V1-PM", "V2", "PM-link", "R-bf16", "R-fp32"};

class Chip : public ::testing::TestWithParam<const char*> {};

TEST_P(Chip, OfEverySetThenAllMetricsExist) {
  const auto table = open_metric_table(GetParam(), CounterKind::Range, kLibrary);
  for (const char* name : kSets) {
    for (const std::string& metric : metric_set(name, GetParam()).metrics) {
      EXPECT_TRUE(table->has(metric)) << name << ": " << metric;
    }
  }
  EXPECT_FALSE(table->has("sm__no_such_metric.sum"));
}
TEST_P(Chip, OfTheVerdictSetThenOnePassIsEnough) {
  const auto table = open_metric_table(GetParam(), CounterKind::Range, kLibrary);
  EXPECT_EQ(table->passes(metric_set("V1", GetParam()).metrics), 1);
  EXPECT_EQ(table->passes(metric_set("R-bf16", GetParam()).metrics), 1);
  EXPECT_EQ(table->passes({"sm__no_such_metric.sum"}), 0);
}
INSTANTIATE_TEST_SUITE_P(Known, Chip, ::testing::Values("GH100", "GB100", "AD103", "GA100"));

TEST(Hopper, OfEverySetThenPassesAreAsTabled) {
  const auto range = open_metric_table("GH100", CounterKind::Range, kLibrary);
  for (const char* name : kSets) {
    const MetricSet set = metric_set(name, "GH100");
    if (set.range_passes > 0) {
      EXPECT_EQ(range->passes(set.metrics), set.range_passes) << name;
    }
  }
  const auto pm = open_metric_table("GH100", CounterKind::PmSampling, kLibrary);
  for (const char* name : {"V1-PM", "V2", "PM-link"}) {
    EXPECT_EQ(pm->passes(metric_set(name, "GH100").metrics), 1) << name;
  }
  EXPECT_GT(range->size(), 3000);
}

TEST(Hopper, OfWholeNcuSpeedOfLightThenOnePassIsNotEnough) {
  const auto table = open_metric_table("GH100", CounterKind::Range, kLibrary);
  EXPECT_GT(table->passes({"sm__throughput.avg.pct_of_peak_sustained_elapsed"}), 1);
}

TEST(Chips, WhenListedThenHopperIsAmongThem) { EXPECT_THAT(counter_chips(kLibrary), Contains("GH100")); }

TEST(MetricTable, OfAnUnknownChipThenSaysSo) {
  EXPECT_THROW(static_cast<void>(open_metric_table("XX999", CounterKind::Range, kLibrary)), ConfigError);
}
TEST(MetricTable, WithoutCuptiThenNamesTheLibrary) {
  try {
    static_cast<void>(counter_chips("/nowhere/libcupti.so.13"));
    FAIL() << "no error";
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("/nowhere/libcupti.so.13"));
  }
}

TEST(Probe, WithoutAGpuThenEveryRungHasItsReason) {
  const auto rungs = probe_counters(0, kLibrary);
  ASSERT_EQ(rungs.size(), 2U);
  EXPECT_EQ(rungs[0].source, Source::Measured);
  EXPECT_EQ(rungs[1].source, Source::Sampled);
  for (const Rung& rung : rungs) EXPECT_NE(rung.usable, !rung.reason.empty());  // with a GPU they may be usable
}

}  // namespace
}  // namespace fsdpp::profiler

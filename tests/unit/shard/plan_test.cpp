#include "fsdpp/shard/plan.h"

#include <gmock/gmock.h>

#include "fsdpp/base/error.h"
#include "unit/shard/plan_checker.h"

namespace fsdpp::shard {
namespace {

using test::Shapes;
using test::violations;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

PlanOptions for_world(int world_size) {
  PlanOptions options;
  options.world_size = world_size;
  return options;
}

/// No alignment and no allowance: row cuts only where they cost nothing.
PlanOptions bare(int world_size) {
  PlanOptions options = for_world(world_size);
  options.param_align = options.slice_align = 1;
  options.padding_fraction = 0;
  options.padding_per_rank = 0;
  return options;
}

TEST(Plan, WithoutParametersThenSliceIsZero) {
  const Plan plan = make_plan({}, for_world(4));
  EXPECT_EQ(plan.slice_numel, 0);
  EXPECT_EQ(plan.total_numel(), 0);
  EXPECT_THAT(violations(plan, {}), IsEmpty());
}

TEST(Plan, WithEmptyParametersOnlyThenSliceIsZero) {
  const Shapes shapes{{0, 5}, {4, 0}, {0, 0}};
  const Plan plan = make_plan(shapes, for_world(3));
  EXPECT_EQ(plan.slice_numel, 0);
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
  EXPECT_EQ(plan.local_range(1, 2), (Range{0, 0}));
}

TEST(Plan, AtWorldOneThenOnlyAlignmentPads) {
  const Shapes shapes{{3, 5}, {1, 1}, {100, 77}, {0, 3}, {7, 1}};
  const Plan plan = make_plan(shapes, for_world(1));
  EXPECT_EQ(plan.slice_numel, (16 + 8 + 7704 + 8 + 63) / 64 * 64);
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
  for (size_t i = 0; i < shapes.size(); ++i) EXPECT_EQ(plan.params[i].cut, Cut::Rows);
}

TEST(Plan, WhenRowsDivideEvenlyThenNoPaddingAndEqualRows) {
  const Shapes shapes{{8, 64}};
  const Plan plan = make_plan(shapes, for_world(4));
  EXPECT_EQ(plan.padding(), 0);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.local_range(0, rank), (Range{rank * 128, rank * 128 + 128}));
}

TEST(Plan, WhenRowsAreTooLongForTheBoundThenCutsElements) {
  const Shapes shapes{{7, 100032}};  // 8 ranks, 7 rows: row cuts would leave one rank empty
  const Plan tight = make_plan(shapes, for_world(8));
  EXPECT_EQ(tight.params[0].cut, Cut::Elements);
  EXPECT_THAT(violations(tight, shapes), IsEmpty());
  PlanOptions loose = for_world(8);
  loose.padding_fraction = 0.2;
  const Plan plan = make_plan(shapes, loose);
  EXPECT_EQ(plan.params[0].cut, Cut::Rows);
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
}

TEST(Plan, WhenLongRowsFitWholeThenNobodyIsCut) {
  const Shapes shapes{{1, 3001}, {1, 3001}, {1, 3001}, {1, 3001}};
  const Plan plan = make_plan(shapes, for_world(2));
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
  for (const ParamPlacement& p : plan.params) {
    EXPECT_EQ(p.cut, Cut::Rows);
    EXPECT_THAT(test::borders_inside(plan, p), IsEmpty());
  }
}

TEST(Plan, WhenOneParameterCannotBeAlignedThenOnlyThatOneIsCutInsideRows) {
  const Shapes shapes{{4096, 64}, {3, 100001}, {4096, 64}};  // the odd one is longer than two slices
  const Plan plan = make_plan(shapes, for_world(16));
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
  EXPECT_EQ(plan.params[0].cut, Cut::Rows);
  EXPECT_EQ(plan.params[1].cut, Cut::Elements);
  EXPECT_EQ(plan.params[2].cut, Cut::Rows);
}

TEST(Plan, WithoutAnyAllowanceThenStillPlans) {
  const Shapes shapes{{5, 3}, {2, 7}, {1, 1}};
  for (int world = 1; world <= 40; ++world) {
    const Plan plan = make_plan(shapes, bare(world));
    EXPECT_THAT(violations(plan, shapes), IsEmpty()) << world;
    EXPECT_LE(plan.padding(), world) << world;
  }
}

TEST(Plan, SmallParametersFillTheGapsThatRowsLeave) {
  // Two long parameters whose rows have no common multiple leave a gap at the border; the vectors fit into it.
  const Shapes shapes{{1000, 96}, {1000, 160}, {32, 1}, {64, 1}};
  const Plan plan = make_plan(shapes, for_world(4));
  EXPECT_THAT(violations(plan, shapes), IsEmpty());
  for (const ParamPlacement& p : plan.params) EXPECT_EQ(p.cut, Cut::Rows);
  EXPECT_LE(plan.padding(), 4 * 320);  // slices are multiples of lcm(160, 64)
}

TEST(Plan, IsDeterministic) {
  const Shapes shapes{{100, 33}, {100, 33}, {7, 9}, {1, 1}, {64, 48}};
  const Plan a = make_plan(shapes, for_world(5));
  const Plan b = make_plan(shapes, for_world(5));
  EXPECT_EQ(a.slice_numel, b.slice_numel);
  for (size_t i = 0; i < shapes.size(); ++i) EXPECT_EQ(a.params[i].offset, b.params[i].offset);
}

TEST(Plan, LocalRangesOfTwoRanksFollowTheSlices) {
  const Shapes shapes{{6, 64}};
  const Plan plan = make_plan(shapes, for_world(4));  // 6 rows on 4 ranks: 2, 2, 2, 0
  EXPECT_EQ(plan.slice_numel, 128);
  EXPECT_EQ(plan.local_range(0, 0), (Range{0, 128}));
  EXPECT_EQ(plan.local_range(0, 2), (Range{256, 384}));
  EXPECT_EQ(plan.local_range(0, 3), (Range{384, 384}));
}

TEST(Plan, WithBadInputThenConfigError) {
  const Shapes one{{4, 4}};
  EXPECT_THROW((void)make_plan(one, for_world(0)), ConfigError);
  EXPECT_THROW((void)make_plan(Shapes{{-1, 4}}, for_world(1)), ConfigError);
  EXPECT_THROW((void)make_plan(Shapes{{4, -1}}, for_world(1)), ConfigError);
  PlanOptions options = for_world(2);
  options.slice_align = 12;
  EXPECT_THROW((void)make_plan(one, options), ConfigError);
  options = for_world(2);
  options.padding_fraction = -0.5;
  EXPECT_THROW((void)make_plan(one, options), ConfigError);
}

TEST(Plan, BeyondTwoToThe62ThenConfigErrorAndBelowItPlans) {
  const int64_t big = int64_t{1} << 40;
  EXPECT_THROW((void)make_plan(Shapes{{big, big}}, for_world(1)), ConfigError);
  EXPECT_THROW((void)make_plan(Shapes{{int64_t{1} << 61, 1}, {int64_t{1} << 61, 1}}, for_world(1)), ConfigError);
  const Shapes shapes{{int64_t{1} << 31, (int64_t{1} << 29) - 1}, {1, (int64_t{1} << 58) + 1}};
  for (const int world : {1, 2, 7, 512})
    EXPECT_THAT(violations(make_plan(shapes, for_world(world)), shapes), IsEmpty());
}

TEST(Plan, LocalRangeOfAnUnknownRankThenUsageError) {
  const Plan plan = make_plan(Shapes{{4, 4}}, for_world(2));
  EXPECT_THROW((void)plan.local_range(0, 2), UsageError);
  EXPECT_THROW((void)plan.local_range(0, -1), UsageError);
}

TEST(PlanText, ShowsEveryParameterAndTheRowsOfEachRank) {
  const Plan plan = make_plan(Shapes{{8, 64}, {7, 100003}}, for_world(8));
  const std::string text = to_string(plan, std::vector<std::string>{"layer.weight", "odd"}, true, 2);
  EXPECT_THAT(text, HasSubstr("layer.weight"));
  EXPECT_THAT(text, HasSubstr("elements  ["));
  EXPECT_THAT(text, HasSubstr("(8 ranks)"));
  EXPECT_THAT(text, HasSubstr("8 ranks x slice " + std::to_string(plan.slice_numel)));
  EXPECT_THAT(to_string(make_plan(Shapes{{8, 64}}, for_world(4)), std::vector<std::string>{"w"}, true),
              HasSubstr("[2,2,2,2]"));
  EXPECT_THROW((void)to_string(plan, std::vector<std::string>{"one"}), UsageError);
}

}  // namespace
}  // namespace fsdpp::shard

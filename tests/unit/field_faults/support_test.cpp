// The checks that the cases rely on see what they are for.
#include <gmock/gmock.h>

#include "unit/field_faults/support.h"

namespace fsdpp::test {
namespace {

TEST(FieldFaultChecks, ValuesThatDifferAreSeen) {
  const auto t = at::tensor({1.0f, 1.0f, 1.00001f});
  EXPECT_FALSE(all_equal(t, 1));
  EXPECT_FALSE(all_near(t, 1.0));
  EXPECT_FALSE(same_values(t, at::ones({3})));
  EXPECT_FALSE(same_values(at::ones({3}), at::ones({3, 1})));
  EXPECT_FALSE(all_equal(at::ones({0}), 1)) << "nothing is not everything";
  EXPECT_FALSE(all_near(at::full({2}, NAN), 1.0));
  EXPECT_TRUE(all_equal(at::ones({2}), 1));
  EXPECT_TRUE(all_near(at::ones({2}) + 5e-7, 1.0));
}

TEST(FieldFaultChecks, WhatAUnitHoldsUnshardedIsSeen) {
  each_rank(2, [](std::shared_ptr<World> world) {
    Sum model(at::ones({4}));
    EXPECT_FALSE(nothing_unsharded(*model)) << "no unit at all";
    auto unit = fully_shard(model, Mesh::shard(world));
    EXPECT_TRUE(nothing_unsharded(*model));
    unit.unshard();
    EXPECT_FALSE(nothing_unsharded(*model)) << "gathered";
    unit.reshard();
    EXPECT_TRUE(nothing_unsharded(*model));
    unit.set_requires_gradient_sync(false);
    model().backward();
    EXPECT_TRUE(unit.is_sharded());
    EXPECT_FALSE(nothing_unsharded(*model)) << "a gradient that waits for its reduction";
    unit.set_requires_gradient_sync(true);
    model().backward();
    EXPECT_TRUE(nothing_unsharded(*model));
  });
}

TEST(FieldFaultChecks, VerdictsTellTheRanksApart) {
  const auto messages = verdicts(3, [](std::shared_ptr<World> world) {
    if (world->rank() == 1) throw UsageError("only me");
  });
  EXPECT_THAT(messages, ::testing::ElementsAre("", "only me", ""));
}

TEST(FieldFaultChecksDeathTest, TheWatchdogEndsAHang) {
  EXPECT_EXIT(
      {
        const Watchdog watchdog(std::chrono::seconds(1));
        std::this_thread::sleep_for(std::chrono::seconds(10));
      },
      ::testing::ExitedWithCode(1), "watchdog: TheWatchdogEndsAHang did not end within 1 s");
}

}  // namespace
}  // namespace fsdpp::test

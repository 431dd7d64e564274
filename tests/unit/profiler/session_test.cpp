#include "profiler/session.h"

#include <gtest/gtest.h>

#include <string>

#include "fsdpp/base/error.h"

namespace fsdpp::profiler {
namespace {

/// Writes what a session does, a letter a call: b(egin) m(ark) k(eep) d(iscard) and R for ready.
class Script : public Recorder {
 public:
  void begin() override { text += "b"; }
  void mark(int64_t step) override { text += "m" + std::to_string(step); }
  void keep() override { text += "k"; }
  void discard() override { text += "d"; }
  std::string text;
};

std::string run(const std::function<Action(int64_t)>& schedule, int steps, bool stop = true) {
  Script script;
  Session session(schedule, script, [&] { script.text += "R"; });
  session.start();
  for (int i = 0; i < steps; ++i) {
    script.text += " ";
    session.step();
  }
  script.text += "|";
  if (stop) session.stop();
  return script.text;
}

std::string actions(const Schedule& schedule, int64_t steps) {
  std::string text;
  for (int64_t i = 0; i < steps; ++i) text += ".wrS"[static_cast<int>(schedule.action(i))];
  return text;
}

TEST(Schedule, CyclesRepeatThenNothingHappens) {
  EXPECT_EQ(actions({.wait = 1, .warmup = 2, .active = 3, .repeat = 2, .skip_first = 2}, 18), "...wwrrS.wwrrS....");
  EXPECT_EQ(actions({.active = 1}, 4), "SSSS");
  EXPECT_EQ(actions({.wait = 2, .active = 1, .repeat = 0}, 7), "..S..S.");
}

TEST(Schedule, WrongNumbersThenConfigError) {
  EXPECT_THROW((void)Options::by({.active = 0}), ConfigError);
  EXPECT_THROW((void)Options::by({.wait = -1}), ConfigError);
  EXPECT_THROW((void)Options::by({.skip_first = -5}), ConfigError);
  EXPECT_NO_THROW((void)Options::by({.wait = 0, .warmup = 0, .active = 1}));
}

TEST(Session, WithoutScheduleThenOneWindow) {
  EXPECT_EQ(run(nullptr, 2), "b m0 m1|m2kR");
  EXPECT_EQ(run(nullptr, 0), "b|m0kR");
}

TEST(Session, WaitingThenNothingIsCalled) {
  EXPECT_EQ(run(Options::by({.wait = 9, .active = 1}), 3), "   |");
}

TEST(Session, WarmupThenItsRecordsAreThrownAway) {
  EXPECT_EQ(run(Options::by({.wait = 1, .warmup = 2, .active = 2, .repeat = 1}), 7), " b  db m3 m4kR  |");
}

TEST(Session, CyclesWithoutWaitingThenEachIsItsOwnWindow) {
  EXPECT_EQ(run(Options::by({.active = 1, .repeat = 3}), 4), "b m0kRb m1kRb m2kR |");
  EXPECT_EQ(run(Options::by({.warmup = 1, .active = 1, .repeat = 2}), 4), "b db m1kRb db m3kR|");
}

TEST(Session, StoppedInsideAWindowThenItIsKept) {
  EXPECT_EQ(run(Options::by({.active = 5, .repeat = 1}), 1), "b m0|m1kR");
}

TEST(Session, StoppedInWarmupThenNothingIsKept) {
  EXPECT_EQ(run(Options::by({.warmup = 5, .active = 1}), 1), "b |d");
}

TEST(Session, ScheduleThatLeavesAWindowOpenThenItIsKept) {
  const auto schedule = [](int64_t step) { return step == 1 ? Action::Record : Action::None; };
  EXPECT_EQ(run(schedule, 2), " b m1kR|");
}

TEST(Session, AbandonedThenNothingIsKept) {
  Script script;
  Session session(nullptr, script, [&] { script.text += "R"; });
  session.abandon();
  session.start();
  session.abandon();
  EXPECT_EQ(script.text, "bd");
  EXPECT_FALSE(session.running());
}

TEST(Session, WrongOrderThenUsageError) {
  Script script;
  Session session(nullptr, script, nullptr);
  EXPECT_THROW(session.step(), UsageError);
  EXPECT_THROW(session.stop(), UsageError);
  session.start();
  EXPECT_THROW(session.start(), UsageError);
  session.stop();
  session.start();  // again is allowed
  EXPECT_EQ(script.text, "bm0kb");
}

}  // namespace
}  // namespace fsdpp::profiler

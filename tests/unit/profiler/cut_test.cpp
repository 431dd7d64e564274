#include <gmock/gmock.h>

#include "analysis_schedule.h"
#include "fsdpp/base/error.h"
#include "fsdpp/profiler/chrome_trace.h"

namespace fsdpp::profiler::testing {
namespace {

/// Two steps; the kernel that step 4 launches last runs when step 5 has begun.
Trace two_steps() {
  Schedule s(0, 400);
  s.step(4, 0, 100);
  s.step(5, 100, 200);
  s.scope(trace::Kind::User, "a", 1, 99);
  const int first = s.op("aten::mm", 10, 30);
  s.scope(trace::Kind::User, "b", 101, 199);
  const int second = s.op("aten::add", 110, 130);
  const int one = s.kernel("one", 120, 150, 20), two = s.kernel("two", 160, 300, 120);
  s.trace.kernels[one].op = first;
  s.trace.kernels[one].scope = 0;
  s.trace.kernels[two].op = second;
  s.trace.kernels[two].scope = 1;
  s.memory(50, 1, 10, MemoryEvent::Category::Other, 0);
  s.memory(150, 2, 10, MemoryEvent::Category::Other, 1);
  return s.trace;
}

TEST(CutToStep, OfTheFirstThenItsLaunchesWheneverTheyRan) {
  const Trace t = cut_to_step(two_steps(), 4);
  ASSERT_EQ(t.kernels.size(), 1U);
  EXPECT_EQ(t.kernels[0].name, "one");
  EXPECT_EQ(t.cpu_ops[t.kernels[0].op].name, "aten::mm");
  EXPECT_EQ(t.steps.size(), 1U);
  EXPECT_EQ(t.memory.size(), 1U);
  EXPECT_EQ(t.end_ns, kBase + 150);
}

TEST(CutToStep, OfTheSecondThenIndicesFollow) {
  const Trace t = cut_to_step(two_steps(), 5);
  ASSERT_EQ(t.kernels.size(), 1U);
  EXPECT_EQ(t.kernels[0].name, "two");
  ASSERT_EQ(t.cpu_ops.size(), 1U);
  ASSERT_EQ(t.scopes.size(), 1U);
  EXPECT_EQ(t.kernels[0].op, 0);
  EXPECT_EQ(t.kernels[0].scope, 0);
  EXPECT_EQ(t.scopes[0].name, "b");
  EXPECT_EQ(t.memory[0].scope, 0);
  EXPECT_EQ(t.start_ns, kBase + 100);
}

TEST(CutToStep, ThatIsNotThereThenRefused) { EXPECT_THROW(static_cast<void>(cut_to_step(two_steps(), 6)), UsageError); }

}  // namespace
}  // namespace fsdpp::profiler::testing

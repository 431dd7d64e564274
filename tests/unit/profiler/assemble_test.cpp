#include "profiler/assemble.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <memory>
#include <thread>
#include <vector>

#include "fsdpp/trace/scope.h"
#include "profiler/buffer_pool.h"
#include "profiler/intervals.h"
#include "profiler/op_args.h"
#include "profiler/scope_recorder.h"

namespace fsdpp::profiler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using trace::Kind;

constexpr int64_t kBase = 1'700'000'000'000'000'000;  // a real moment: zero means "no time"

RawOp op(const char* name, int64_t start, int64_t end) {
  RawOp o;
  o.name = name;
  o.start_ns = kBase + start;
  o.end_ns = end == 0 ? 0 : kBase + end;
  return o;
}

Scope scope(Kind kind, const char* name, int64_t start, int64_t end, int64_t thread = 1) {
  Scope s;
  s.kind = kind;
  s.name = name;
  s.start_ns = kBase + start;
  s.end_ns = end == 0 ? 0 : kBase + end;
  s.thread = thread;
  return s;
}

Runtime launch(int64_t start, int64_t end, int64_t correlation, const char* name = "cudaLaunchKernel", int64_t thread = 1) {
  Runtime r;
  r.name = name;
  r.start_ns = kBase + start;
  r.end_ns = kBase + end;
  r.thread = thread;
  r.correlation = correlation;
  r.launch = std::string(name).find("LaunchKernel") != std::string::npos;
  return r;
}

Kernel kernel(const char* name, int64_t start, int64_t end, int64_t correlation, int64_t node = 0) {
  Kernel k;
  k.name = name;
  k.start_ns = kBase + start;
  k.end_ns = kBase + end;
  k.correlation = correlation;
  k.graph_node_id = node;
  return k;
}

RecordedWindow window(int64_t start = 0, int64_t end = 10'000'000) {
  RecordedWindow w;
  w.start_ns = kBase + start;
  w.end_ns = kBase + end;
  return w;
}

ThreadRecords thread(std::vector<RawOp> ops, std::vector<Scope> scopes = {}, int64_t id = 1) {
  ThreadRecords t;
  t.thread = id;
  t.ops = std::move(ops);
  t.scopes = std::move(scopes);
  return t;
}

DeviceRecords device(std::vector<Runtime> runtime, std::vector<Kernel> kernels) {
  DeviceRecords d;
  d.available = true;
  d.runtime = std::move(runtime);
  d.kernels = std::move(kernels);
  return d;
}

TEST(IntervalIndex, NestedIntervalsThenInnermostAndParents) {
  std::vector<Scope> items{scope(Kind::User, "a", 0, 100), scope(Kind::User, "b", 10, 40), scope(Kind::User, "c", 20, 30),
                           scope(Kind::User, "d", 50, 60), scope(Kind::User, "other", 0, 100, 2)};
  const IntervalIndex index(items);
  EXPECT_THAT(index.parents(), ElementsAre(-1, 0, 1, 0, -1));
  const auto at = [&](int64_t t, int64_t thread = 1) { return index.innermost(thread, kBase + t); };
  EXPECT_EQ(at(25), 2);
  EXPECT_EQ(at(30), 1);  // the end is outside
  EXPECT_EQ(at(45), 0);
  EXPECT_EQ(at(59), 3);
  EXPECT_EQ(at(100), -1);
  EXPECT_EQ(at(-1), -1);
  EXPECT_EQ(at(25, 2), 4);
  EXPECT_EQ(at(25, 3), -1);
}

TEST(Assemble, LaunchInAnOperatorThenItsKernelBelongsToIt) {
  HostRecords host{thread({op("linear", 100, 900), op("mm", 200, 800)}, {scope(Kind::User, "step", 0, 1000)})};
  const Trace t = assemble(std::move(host), device({launch(300, 350, 7)}, {kernel("gemm", 400, 600, 7)}), window());
  EXPECT_EQ(t.cpu_ops[1].parent, 0);
  EXPECT_EQ(t.kernels[0].op, 1);
  EXPECT_EQ(t.kernels[0].scope, 0);
  EXPECT_EQ(t.runtime[0].op, 1);
  EXPECT_EQ(t.audit.launches, 1);
  EXPECT_EQ(t.audit.kernels, 1);
  EXPECT_THAT(t.audit.errors, IsEmpty());
  EXPECT_THAT(t.audit.notes, IsEmpty());
}

TEST(Assemble, BetweenPreAndPostForwardThenTheUnitsForward) {
  HostRecords host{thread({}, {scope(Kind::PreForward, "root", 0, 10), scope(Kind::PreForward, "layer", 20, 30),
                               scope(Kind::Unshard, "layer", 22, 28), scope(Kind::PostForward, "layer", 60, 70),
                               scope(Kind::PostForward, "root", 90, 95)})};
  const Trace t = assemble(std::move(host),
                           device({launch(24, 25, 1), launch(40, 41, 2), launch(80, 81, 3), launch(99, 100, 4)},
                                  {kernel("gather", 50, 60, 1), kernel("layer", 70, 80, 2), kernel("root", 90, 99, 3), kernel("none", 100, 110, 4)}),
                           window());
  const auto unit = [&](int k) {
    const int s = t.kernels[k].scope;
    return s < 0 ? std::string("-") : std::string(trace::name_of(t.scopes[s].kind)) + " " + t.scopes[s].name;
  };
  EXPECT_EQ(unit(0), "Unshard layer");
  EXPECT_EQ(unit(1), "Forward layer");
  EXPECT_EQ(unit(2), "Forward root");
  EXPECT_EQ(unit(3), "-");
}

TEST(Assemble, LaunchIntoACaptureThenNoKernelIsMissedAndReplaysFindIt) {
  HostRecords host{thread({op("captured", 100, 200), op("replay", 300, 400)})};
  DeviceRecords d = device({launch(110, 120, 1), launch(310, 320, 2, "cudaGraphLaunch")}, {kernel("k", 500, 600, 2, 77)});
  d.graph_nodes = {{5, 0, 1, kBase + 115}, {77, 5, 1, kBase + 250}};
  const Trace t = assemble(std::move(host), std::move(d), window());
  EXPECT_EQ(t.cpu_ops[t.kernels[0].op].name, "captured");
  EXPECT_EQ(t.audit.launches, 0);
  EXPECT_EQ(t.audit.launches_without_kernel, 0);
  EXPECT_EQ(t.audit.graph_launches, 1);
  EXPECT_EQ(t.audit.graph_kernels, 1);
  EXPECT_THAT(t.audit.notes, IsEmpty());
}

TEST(Assemble, GraphOfAnEarlierWindowThenANoteSaysSo) {
  DeviceRecords d = device({launch(310, 320, 2, "cudaGraphLaunch")}, {kernel("replayed", 500, 600, 2, 77)});
  const Trace t = assemble({}, std::move(d), window());
  EXPECT_EQ(t.kernels[0].op, -1);
  EXPECT_THAT(t.audit.notes, ElementsAre(HasSubstr("captured outside of this window, so without operator and scope: replayed")));
}

TEST(Assemble, DriverLaunchInsideARuntimeLaunchThenOneLaunch) {
  auto inner = launch(12, 18, 2, "cuLaunchKernel");
  inner.driver = true;
  auto alone = launch(30, 40, 3, "cuLaunchKernelEx");
  alone.driver = true;
  const Trace t = assemble({}, device({launch(10, 20, 1), inner, alone}, {kernel("a", 50, 60, 1), kernel("nccl", 60, 70, 3)}), window());
  EXPECT_EQ(t.audit.launches, 2);
  EXPECT_EQ(t.audit.launches_without_kernel, 0);
}

TEST(Audit, LaunchesWithoutAnyKernelThenError) {
  HostRecords host{thread({op("mm", 0, 100)})};
  const Trace t = assemble(std::move(host), device({launch(10, 20, 1), launch(30, 40, 2)}, {}), window());
  ASSERT_EQ(t.audit.errors.size(), 1U);
  EXPECT_THAT(t.audit.errors[0], HasSubstr("no kernel was recorded, but 2 launches were"));
  EXPECT_THAT(t.audit.notes, ElementsAre("2 launches without a kernel record: cudaLaunchKernel in mm, cudaLaunchKernel in mm"));
}

TEST(Audit, EveryFaultThenCountedAndNamed) {
  Kernel untimed = kernel("untimed", 0, 0, 1);
  untimed.start_ns = untimed.end_ns = 0;
  DeviceRecords d = device({launch(10, 20, 1), launch(30, 40, 2), launch(50, 60, 3), launch(70, 80, 4)},
                           {untimed, kernel("early", 25, 35, 2), kernel("backwards", 90, 85, 3), kernel("alone", 100, 110, 99),
                            kernel("yesterday", -86'400'000'000'000, -86'300'000'000'000, 4)});
  d.dropped_records = 3;
  d.refused_buffers = 1;
  d.truncated_buffers = 2;
  d.unknown_kinds = {{77, 4}};
  d.errors = {"CUPTI says: fatal"};
  Overhead o;
  o.kind = "LAZY_FUNCTION_LOADING";
  o.end_ns = 500;
  d.overheads = {o, o};
  RecordedWindow w = window();
  w.clock_shift_ns = -2'000'000;
  const Audit a = assemble({thread({op("open", 10, 0)})}, std::move(d), w).audit;
  EXPECT_EQ(a.zero_stamps, 1);
  EXPECT_EQ(a.out_of_order, 1);
  EXPECT_EQ(a.reversed_stamps, 1);
  EXPECT_EQ(a.kernels_without_launch, 1);
  EXPECT_EQ(a.launches_without_kernel, 1);  // that of "yesterday", which was left out
  EXPECT_EQ(a.outside_window, 1);
  EXPECT_EQ(a.unknown_records, 4);
  EXPECT_EQ(a.cut_by_window, 1);
  EXPECT_EQ(a.cupti_errors, 1);
  EXPECT_EQ(a.overhead_ns.at("LAZY_FUNCTION_LOADING"), 1000);
  EXPECT_THAT(a.errors, ElementsAre("CUPTI says: fatal", HasSubstr("3 records were dropped"), HasSubstr("1 buffers were refused"),
                                    HasSubstr("2 buffers could not be read")));
  const std::string notes = testing::PrintToString(a.notes);
  for (const char* text : {"untimed", "kernels stamped before their launch: early", "backwards", "alone", "unknown kind 77",
                           "host's clock was set by -2000000 ns", "open at the window's end"})
    EXPECT_THAT(notes, HasSubstr(text));
}

TEST(Audit, MoreThanThreeCasesThenTheFirstAreNamed) {
  DeviceRecords d = device({}, {kernel("a", 1, 2, 1), kernel("b", 3, 4, 2), kernel("c", 5, 6, 3), kernel("d", 7, 8, 4)});
  EXPECT_THAT(assemble({}, std::move(d), window()).audit.notes, ElementsAre("4 kernels without a launch record: a, b, c, …"));
}

TEST(Collectives, LaunchedInTheCallThenTimesOfItsKernel) {
  ThreadRecords host = thread({}, {scope(Kind::Unshard, "layer", 100, 200)});
  RawCollective raw;
  raw.collective.comm = "shard";
  raw.collective.op = "all_gather";
  raw.collective.sequence = 4;
  raw.collective.thread = 1;
  raw.collective.issued_ns = raw.collective.start_ns = kBase + 110;
  raw.collective.end_ns = kBase + 150;
  host.collectives.push_back(raw);
  Kernel nccl = kernel("ncclKernel", 1000, 5000, 9);
  nccl.stream = 20;
  const Trace t = assemble({host}, device({launch(120, 140, 9), launch(160, 170, 10)}, {kernel("cast", 900, 950, 10), nccl}), window());
  ASSERT_EQ(t.collectives.size(), 1U);
  const Collective& c = t.collectives[0];
  EXPECT_TRUE(c.on_device);
  EXPECT_EQ(c.start_ns, kBase + 1000);
  EXPECT_EQ(c.end_ns, kBase + 5000);
  EXPECT_EQ(c.stream, 20);
  EXPECT_EQ(t.kernels[c.kernel].name, "ncclKernel");
  EXPECT_EQ(t.scopes[c.scope].name, "layer");
}

TEST(Collectives, InAGroupThenTimesOfItsOneLaunch) {
  ThreadRecords host = thread({});
  for (int i = 0; i < 3; ++i) {
    RawCollective raw;
    raw.in_group = i < 2;
    raw.collective.op = i < 2 ? "all_gather" : "group";
    raw.collective.sequence = i < 2 ? i : -1;
    raw.collective.thread = 1;
    raw.collective.issued_ns = raw.collective.start_ns = kBase + 100 + i * 100;
    raw.collective.end_ns = kBase + 150 + i * 100;
    host.collectives.push_back(raw);
  }
  const Trace t = assemble({host}, device({launch(310, 320, 1)}, {kernel("nccl", 400, 700, 1)}), window());
  ASSERT_EQ(t.collectives.size(), 2U);
  for (const Collective& c : t.collectives) EXPECT_EQ(c.end_ns, kBase + 700);
}

TEST(Collectives, OnTheHostThenTheCallsTimes) {
  ThreadRecords host = thread({});
  RawCollective raw;
  raw.collective.thread = 1;
  raw.collective.issued_ns = raw.collective.start_ns = kBase + 5;
  raw.collective.end_ns = kBase + 9;
  host.collectives.push_back(raw);
  const Trace t = assemble({host}, {}, window());
  EXPECT_FALSE(t.collectives[0].on_device);
  EXPECT_EQ(t.collectives[0].end_ns, kBase + 9);
}

TEST(Memory, EventsThenCategoriesByScopeAndFreesFollowTheirAllocation) {
  using Category = MemoryEvent::Category;
  ThreadRecords host = thread({op("mm", 100, 200)}, {scope(Kind::PreForward, "l", 0, 10), scope(Kind::Unshard, "l", 2, 8),
                                                     scope(Kind::PostForward, "l", 300, 310), scope(Kind::Optimizer, "", 500, 600)});
  const auto event = [](int64_t time, int64_t bytes, uint64_t address) {
    MemoryEvent e;
    e.time_ns = kBase + time;
    e.bytes = bytes;
    e.address = address;
    e.thread = 1;
    return e;
  };
  host.memory = {event(5, 64, 1), event(150, 32, 2), event(550, 16, 3), event(560, -32, 2), event(700, 8, 4)};
  const Trace t = assemble({host}, {}, window());
  std::vector<Category> categories;
  for (const MemoryEvent& e : t.memory) categories.push_back(e.category);
  EXPECT_THAT(categories, ElementsAre(Category::Gathered, Category::Activations, Category::Optimizer, Category::Activations, Category::Other));
  EXPECT_EQ(t.cpu_ops[0].bytes, 32);
}

TEST(Flops, CountedByAnOuterOperatorThenNotAgainInside) {
  ThreadRecords host = thread({op("aten::scaled_dot_product_attention", 0, 100), op("aten::bmm", 10, 20), op("aten::bmm", 200, 210)});
  const auto give = [&](RawOp& raw, std::vector<Arg> args) {
    raw.args_begin = host.args.size();
    for (const Arg& arg : args) write_arg(host.args, arg);
    raw.args_end = host.args.size();
  };
  give(host.ops[0], {Arg::tensor({1, 1, 2, 4}), Arg::tensor({1, 1, 2, 4}), Arg::tensor({1, 1, 2, 4})});
  give(host.ops[1], {Arg::tensor({1, 2, 4}), Arg::tensor({1, 4, 2})});
  give(host.ops[2], {Arg::tensor({1, 2, 4}), Arg::tensor({1, 4, 2})});
  RecordedWindow w = window();
  w.with_flops = w.record_shapes = true;
  const Trace t = assemble({host}, {}, w);
  EXPECT_EQ(t.cpu_ops[0].flops, 2.0 * 2 * 2 * 8);
  EXPECT_EQ(t.cpu_ops[1].flops, 0);
  EXPECT_EQ(t.cpu_ops[2].flops, 2.0 * 2 * 4 * 2);
  EXPECT_EQ(t.cpu_ops[2].shapes, "[[1, 2, 4], [1, 4, 2]]");
}

TEST(HostLog, ScopesOfTwoThreadsThenEachInItsOwnRecords) {
  trace::set_listener(&ScopeRecorder::instance());
  { trace::Scope before(Kind::User, "before the window"); }
  HostLog::instance().open();
  {
    trace::Scope outer(Kind::User, "outer");
    trace::Scope inner(Kind::Unshard, "inner", 42);
    std::thread([] { trace::Scope other(Kind::User, "other"); }).join();
    trace::CollectiveScope collective({"shard", "all_gather", "inner", 3, 42, false});
  }
  auto open_at_end = std::make_unique<trace::Scope>(Kind::User, "open");
  HostRecords host = HostLog::instance().close();
  open_at_end.reset();
  trace::set_listener(nullptr);
  { trace::Scope after(Kind::User, "after"); }
  EXPECT_THAT(HostLog::instance().close(), IsEmpty());

  const Trace t = assemble(std::move(host), {}, window(0, 900'000'000'000'000'000));
  ASSERT_EQ(t.scopes.size(), 4U);
  ASSERT_EQ(t.collectives.size(), 1U);
  EXPECT_EQ(t.collectives[0].sequence, 3);
  EXPECT_EQ(t.audit.cut_by_window, 1);
  for (const Scope& s : t.scopes) {
    if (s.name != "inner") continue;
    EXPECT_EQ(t.scopes[s.parent].name, "outer");
    EXPECT_EQ(s.bytes, 42);
    EXPECT_EQ(t.scopes[t.collectives[0].scope].name, "inner");
  }
}

TEST(BufferPool, LimitReachedThenRefusedAndCounted) {
  BufferPool pool(2 * int64_t{BufferPool::kBufferBytes});
  pool.prepare(8);  // no more than the limit
  uint8_t* first = pool.take();
  uint8_t* second = pool.take();
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(first[BufferPool::kBufferBytes - 1], 0);
  EXPECT_EQ(pool.take(), nullptr);
  EXPECT_EQ(pool.refused(), 1);
  EXPECT_EQ(pool.refused(), 0);
  pool.complete(first, 17);
  const auto full = pool.completed();
  ASSERT_EQ(full.size(), 1U);
  EXPECT_EQ(full[0].valid, 17U);
  pool.release(first);
  EXPECT_NE(first = pool.take(), nullptr);  // there is room again
  pool.complete(first, 0);
  pool.complete(second, 0);
}

}  // namespace
}  // namespace fsdpp::profiler

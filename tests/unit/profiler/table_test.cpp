#include "fsdpp/profiler/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "profiler/op_args.h"

namespace fsdpp::profiler {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

CpuOp op(const char* name, int64_t start, int64_t end, int parent = -1, int scope = -1) {
  CpuOp o;
  o.name = name;
  o.start_ns = start;
  o.end_ns = end;
  o.parent = parent;
  o.scope = scope;
  return o;
}

Kernel kernel(const char* name, int64_t start, int64_t end, int op, int scope = -1) {
  Kernel k;
  k.name = name;
  k.start_ns = start;
  k.end_ns = end;
  k.op = op;
  k.scope = scope;
  return k;
}

/// linear [0, 10 µs) ⊃ addmm [2, 8 µs) with a kernel of 5 µs; then relu [20, 23 µs) with one of 1 µs; a copy of 2 µs.
Trace small_trace() {
  Trace t;
  t.cpu_ops = {op("aten::linear", 0, 10'000), op("aten::addmm", 2'000, 8'000, 0), op("aten::relu", 20'000, 23'000)};
  t.cpu_ops[1].flops = 6e9;
  t.cpu_ops[1].shapes = "[[3], [2, 3]]";
  t.kernels = {kernel("gemm", 30'000, 35'000, 1), kernel("relu_kernel", 36'000, 37'000, 2)};
  Copy c;
  c.kind = Copy::Kind::HostToDevice;
  c.start_ns = 40'000;
  c.end_ns = 42'000;
  t.copies = {c};
  return t;
}

const Average& row(const KeyAverages& averages, const std::string& name) {
  for (const Average& a : averages.rows())
    if (a.name == name) return a;
  throw Error("no row " + name);
}

TEST(KeyAverages, NestedOperatorsThenSelfAndTotalAreExact) {
  const Trace t = small_trace();
  const KeyAverages averages = key_averages(t);
  EXPECT_EQ(averages.rows().size(), 6U);
  const Average& linear = row(averages, "aten::linear");
  EXPECT_EQ(linear.cpu_total_ns, 10'000);
  EXPECT_EQ(linear.cpu_self_ns, 4'000);
  EXPECT_EQ(linear.cuda_total_ns, 5'000);
  EXPECT_EQ(linear.cuda_self_ns, 0);
  const Average& addmm = row(averages, "aten::addmm");
  EXPECT_EQ(addmm.cuda_self_ns, 5'000);
  EXPECT_EQ(addmm.flops, 6e9);
  EXPECT_TRUE(row(averages, "gemm").on_device);
  EXPECT_EQ(row(averages, "gemm").cpu_total_ns, 0);
  EXPECT_EQ(row(averages, "Memcpy HtoD").cuda_self_ns, 2'000);
  EXPECT_EQ(averages.cpu_time_ns(), 13'000);  // 4 + 6 + 3 µs
  EXPECT_EQ(averages.cuda_time_ns(), 8'000);  // each kernel and copy once
}

TEST(KeyAverages, RecursionThenTotalCountsOnce) {
  Trace t;
  t.cpu_ops = {op("f", 0, 100), op("g", 10, 90, 0), op("f", 20, 80, 1)};
  t.kernels = {kernel("k", 200, 230, 2)};
  const KeyAverages averages = key_averages(t);
  const Average& f = row(averages, "f");
  EXPECT_EQ(f.count, 2);
  EXPECT_EQ(f.cpu_total_ns, 100);
  EXPECT_EQ(f.cpu_self_ns, 20 + 60);
  EXPECT_EQ(f.cuda_total_ns, 30);
}

TEST(KeyAverages, ChildListedBeforeParentThenTheSame) {
  Trace t;
  t.cpu_ops = {op("inner", 10, 90, 1), op("outer", 0, 100)};
  t.kernels = {kernel("k", 200, 230, 0)};
  const KeyAverages averages = key_averages(t);
  EXPECT_EQ(row(averages, "outer").cuda_total_ns, 30);
  EXPECT_EQ(row(averages, "outer").cpu_self_ns, 20);
}

TEST(KeyAverages, ByShapeThenOneRowEach) {
  Trace t;
  t.cpu_ops = {op("mm", 0, 10), op("mm", 20, 40), op("mm", 50, 51)};
  t.cpu_ops[0].shapes = t.cpu_ops[2].shapes = "[[1, 2]]";
  t.cpu_ops[1].shapes = "[[3, 4]]";
  EXPECT_EQ(key_averages(t).rows().size(), 1U);
  const KeyAverages averages = key_averages(t, GroupBy::Shape);
  ASSERT_EQ(averages.rows().size(), 2U);
  EXPECT_EQ(averages.rows()[0].cpu_total_ns, 11);
  EXPECT_EQ(averages.rows()[1].cpu_total_ns, 20);
  EXPECT_THAT(averages.table("cpu_time_total"), HasSubstr("Input Shapes"));
  EXPECT_THAT(key_averages(t).table("cpu_time_total"), Not(HasSubstr("Input Shapes")));
}

TEST(KeyAverages, ByUnitThenKernelsOfItsScopesCountOnce) {
  Trace t;
  t.scopes.resize(2);
  t.scopes[0].name = "layers.0";
  t.scopes[1].name = "layers.1";
  t.cpu_ops = {op("linear", 0, 10, -1, 0), op("mm", 2, 8, 0, 0), op("relu", 20, 30, -1, 1), op("loss", 40, 45)};
  t.kernels = {kernel("gemm", 100, 150, 1, 0), kernel("relu", 160, 170, 2, 1), kernel("nccl", 160, 190, -1, 1)};
  const KeyAverages averages = key_averages(t, GroupBy::Unit);
  ASSERT_EQ(averages.rows().size(), 3U);
  EXPECT_EQ(row(averages, "layers.0").cuda_total_ns, 50);
  EXPECT_EQ(row(averages, "layers.0").cpu_total_ns, 10);
  EXPECT_EQ(row(averages, "layers.1").cuda_total_ns, 40);
  EXPECT_EQ(row(averages, "(no unit)").cpu_total_ns, 5);
}

TEST(KeyAverages, MemoryThenTotalsHoldThoseInside) {
  Trace t;
  t.profile_memory = true;
  t.cpu_ops = {op("outer", 0, 100), op("inner", 10, 90, 0)};
  t.cpu_ops[0].bytes = -512;
  t.cpu_ops[1].bytes = 2048;
  t.cpu_ops[1].device_bytes = 3 << 20;
  const KeyAverages averages = key_averages(t);
  EXPECT_EQ(row(averages, "outer").cpu_memory, 1536);
  EXPECT_EQ(row(averages, "outer").cpu_self_memory, -512);
  EXPECT_EQ(row(averages, "outer").cuda_memory, 3 << 20);
  const std::string table = averages.table("cpu_time_total");
  EXPECT_THAT(table, HasSubstr("1.50 KB"));
  EXPECT_THAT(table, HasSubstr("-512 B"));
  EXPECT_THAT(table, HasSubstr("3.00 MB"));
}

TEST(Table, KnownTraceThenTextIsExact) {
  Trace t;
  t.cpu_ops = {op("aten::mm", 0, 1'500'000), op("aten::add", 2'000'000, 2'500'000)};
  EXPECT_EQ(key_averages(t).table("cpu_time_total"),
            "-------------  ------------  ------------  ------------  ------------  ------------  ------------  \n"
            "         Name    Self CPU %      Self CPU   CPU total %     CPU total  CPU time avg    # of Calls  \n"
            "-------------  ------------  ------------  ------------  ------------  ------------  ------------  \n"
            "     aten::mm        75.00%       1.500ms        75.00%       1.500ms       1.500ms             1  \n"
            "    aten::add        25.00%     500.000us        25.00%     500.000us     500.000us             1  \n"
            "-------------  ------------  ------------  ------------  ------------  ------------  ------------  \n"
            "Self CPU time total: 2.000ms\n");
}

TEST(Table, SortedAndLimitedThenTheLargestRemain) {
  const Trace t = small_trace();
  const std::string table = key_averages(t).table("cuda_time_total", 2);
  EXPECT_THAT(table, HasSubstr("aten::addmm"));
  EXPECT_THAT(table, HasSubstr("aten::linear"));
  EXPECT_THAT(table, Not(HasSubstr("relu")));
  EXPECT_THAT(table, HasSubstr("Self CUDA time total: 8.000us"));
  EXPECT_THAT(table, HasSubstr("62.50%"));  // 5 of 8 µs
  EXPECT_THAT(table, HasSubstr("Total GFLOPs"));
  EXPECT_EQ(table, key_averages(t).table("device_time_total", 2));
  EXPECT_EQ(key_averages(t).sorted("name").front().name, "Memcpy HtoD");
}

TEST(Table, UnknownKeyThenErrorNamesTheKnownOnes) {
  const KeyAverages averages = key_averages(small_trace());
  try {
    (void)averages.table("gpu_time");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("gpu_time"));
    EXPECT_THAT(error.what(), HasSubstr("cuda_time_total"));
  }
}

TEST(Table, LongAndHostileNamesThenOneLineEach) {
  Trace t;
  t.cpu_ops = {op(std::string(10'000, 'x').c_str(), 0, 10), op("two\nlines", 20, 30)};
  const std::string table = key_averages(t).table("cpu_time_total");
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 7);
  EXPECT_THAT(table, HasSubstr("xxx..."));
}

TEST(Table, EmptyTraceThenNoRows) {
  const KeyAverages averages = key_averages(Trace{});
  EXPECT_THAT(averages.table(), HasSubstr("Self CPU time total: 0.000us"));
  EXPECT_EQ(nlohmann::json::parse(averages.json()), nlohmann::json::array());
}

TEST(Table, JsonAndCsvThenTheSameNumbers) {
  Trace t = small_trace();
  t.cpu_ops[2].name = "a\"b,c\n";
  const KeyAverages averages = key_averages(t);
  const auto rows = nlohmann::json::parse(averages.json("self_cpu_time_total"));
  ASSERT_EQ(rows.size(), 6U);
  EXPECT_EQ(rows[0]["name"], "aten::addmm");
  EXPECT_EQ(rows[0]["self_cpu_time_total_us"], 6.0);
  EXPECT_EQ(rows[2]["name"], "a\"b,c\n");
  EXPECT_EQ(rows[2]["cuda_time_total_us"], 1.0);
  EXPECT_THAT(averages.csv(), HasSubstr("\r\n\"a\"\"b,c\n\",\"\",cpu,1,3.000,3.000,1.000,1.000,0,0,0,0,0\r\n"));
}

TEST(Flops, MatrixProductsThenTwicePerMultiplyAdd) {
  const auto mm = [](std::vector<Arg> args, const char* name) { return flops_of(name, args); };
  EXPECT_EQ(mm({Arg::tensor({3, 5}), Arg::tensor({5, 7})}, "aten::mm"), 2.0 * 3 * 5 * 7);
  EXPECT_EQ(mm({Arg::tensor({7}), Arg::tensor({3, 5}), Arg::tensor({5, 7})}, "aten::addmm"), 2.0 * 3 * 5 * 7);
  EXPECT_EQ(mm({Arg::tensor({2, 3, 5}), Arg::tensor({2, 5, 7})}, "aten::bmm"), 2.0 * 2 * 3 * 5 * 7);
  EXPECT_EQ(mm({Arg::tensor({3, 7}), Arg::tensor({3, 5}), Arg::tensor({7, 5})}, "fsdpp::product"), 2.0 * 3 * 5 * 7);
  EXPECT_EQ(mm({Arg::tensor({3, 7})}, "fsdpp::product"), 0);
  EXPECT_EQ(
      mm({Arg::tensor({3, 7}), Arg::tensor({3, 7}), Arg::tensor({3, 5}), Arg::tensor({7, 5})}, "fsdpp::silu_product"),
      2.0 * 3 * 5 * 7);
  EXPECT_EQ(mm({Arg::tensor({3, 5}), Arg::tensor({4, 7})}, "aten::mm"), 0);  // they don't fit
  EXPECT_EQ(mm({}, "aten::mm"), 0);
  EXPECT_EQ(mm({Arg::tensor({3, 5}), Arg::tensor({5, 7})}, "aten::add"), 0);
}

TEST(Flops, ConvolutionThenByItsOutput) {
  // 8 × 3 × 32 × 32 by 16 filters of 3 × 3 × 3, stride 2, padding 1: 16 × 16 points.
  std::vector<Arg> args{Arg::tensor({8, 3, 32, 32}), Arg::tensor({16, 3, 3, 3}), Arg{}, Arg::list({2, 2}), Arg::list({1, 1}),
                        Arg::list({1, 1}), Arg::number(0), Arg::list({0, 0}), Arg::number(1)};
  const double forward = 2.0 * 8 * 16 * 16 * 16 * 27;
  EXPECT_EQ(flops_of("aten::convolution", args), forward);
  const std::vector<Arg> backward{Arg::tensor({8, 16, 16, 16}), Arg::tensor({8, 3, 32, 32}), Arg::tensor({16, 3, 3, 3}), Arg{}, Arg{}, Arg{},
                                  Arg{}, Arg::number(0), Arg{}, Arg::number(1), Arg::list({0, 1, 1})};
  EXPECT_EQ(flops_of("aten::convolution_backward", backward), forward);  // the weight's gradient alone
  args[6] = Arg::number(1);
  args[1] = Arg::tensor({3, 16, 3, 3});
  EXPECT_EQ(flops_of("aten::convolution", args), 2.0 * 8 * 3 * 32 * 32 * 16 * 9);  // transposed
}

TEST(Flops, AttentionThenTwoProductsForwardAndFiveBackward) {
  const Arg q = Arg::tensor({2, 4, 128, 64}), k = Arg::tensor({2, 4, 256, 64}), v = Arg::tensor({2, 4, 256, 32});
  const double unit = 2.0 * 2 * 4 * 128 * 256;
  EXPECT_EQ(flops_of("aten::scaled_dot_product_attention", {q, k, v}), unit * (64 + 32));
  EXPECT_EQ(flops_of("aten::_scaled_dot_product_flash_attention_backward", {v, q, k, v}), unit * (3 * 64 + 2 * 32));
  const Arg packed = Arg::tensor({2, 16, 3 * 8 * 4}), out = Arg::tensor({2, 16, 8 * 4}),
            stats = Arg::tensor({2, 8, 16, 1});
  EXPECT_EQ(flops_of("fsdpp::attention", {out, stats, packed}), 2.0 * 2 * 8 * 16 * 16 * (4 + 4));
  EXPECT_EQ(flops_of("fsdpp::attention_gradient", {packed, out, stats, packed, out}),
            2.0 * 2 * 8 * 16 * 16 * (3 * 4 + 2 * 4));
}

TEST(OpArgs, WrittenThenReadBackEqualAndCutTailsAreSafe) {
  const std::vector<Arg> args{Arg::tensor({2, 0, 3}), Arg{ArgTag::TensorList, {{6, {4}}, {15, {}}}, {}}, Arg::list({1, 2}), Arg::number(-7), Arg{}};
  std::vector<int64_t> encoded;
  for (const Arg& arg : args) write_arg(encoded, arg);
  const auto back = read_args(encoded);
  EXPECT_EQ(shapes_text(back), "[[2, 0, 3], [[4], []], [], [], []]");
  EXPECT_EQ(dtypes_text(back), "['float', 'TensorList', 'ScalarList', 'Scalar', '']");
  EXPECT_EQ(back[3].ints, std::vector<int64_t>{-7});
  for (size_t n = 0; n < encoded.size(); ++n) EXPECT_LE(read_args(std::span(encoded).first(n)).size(), 5U);
}

}  // namespace
}  // namespace fsdpp::profiler

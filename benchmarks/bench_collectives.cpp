// Bus bandwidth of all-gather and reduce-scatter by size: fsdpp's communicator and a bare NCCL loop in turns on the same buffers
// and stream. One JSON object a row, then a table. Before timing, one round of random values is checked: gathers must be equal,
// sums within the rounding of the dtype. On the CPU there is no bare loop.
//
// Formulas (S: bytes of the whole buffer, n: ranks, t: time of a call): busbw = S / t · (n − 1) / n; ratio_to_bare = t_bare / t;
// ratio_to_link = busbw / 450 GB/s, what NVLink 4 gives a GPU in one direction. t: time between two events around `calls` calls,
// divided by their number, of the slowest rank; median over the rounds. host_us: the host's time to issue a call.
// Gathers are in place, as the engine's; reductions are not. The communicator offers no registered buffers or symmetric windows,
// so neither side uses them.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <iostream>

#include "bare_nccl.h"
#include "fsdpp/comm/world.h"
#include "support/device.h"
#include "support/options.h"
#include "support/ranks.h"

namespace {

using bench::fixed;
using Clock = std::chrono::steady_clock;
constexpr double kLinkGBps = 450;

struct Settings {
  std::string device = "cpu";
  std::string gather_dtype = "bf16", reduce_dtype = "fp32";
  int64_t min_bytes = 1 << 10, max_bytes = 1 << 30;
  int rounds = 7, most_calls = 200;
  bool spoil = false;
};

std::optional<Settings> parse(int argc, char** argv) {
  Settings s;
  CLI::App app("Bus bandwidth of all-gather and reduce-scatter beside a bare NCCL loop.", "bench_collectives");
  const auto dtypes = CLI::IsMember({"bf16", "fp32"});
  bench::add_device_flag(app, s.device);
  app.add_option("--gather-dtype", s.gather_dtype, "bf16 or fp32")->check(dtypes)->capture_default_str();
  app.add_option("--reduce-dtype", s.reduce_dtype, "bf16 or fp32")->check(dtypes)->capture_default_str();
  app.add_option("--min-bytes", s.min_bytes, "Smallest whole buffer; sizes grow by 4")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--max-bytes", s.max_bytes, "Largest whole buffer")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", s.rounds, "Turns of each side")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--calls", s.most_calls, "Calls of a turn, at most")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--spoil", s.spoil, "Test aid: change one value before the check, which then has to fail");
  if (!bench::parse(app, argc, argv)) return std::nullopt;
  return s;
}

struct Ranks {
  fsdpp::comm::World& world;
  fsdpp::comm::Communicator& ours;
  bench::BareCollectives* bare;  // null: none
  fsdpp::cuda::StreamView stream;
};

/// One operation on its buffers.
struct Case {
  std::string op;
  c10::ScalarType dtype;
  int64_t count;  // elements of one rank's part
  at::Tensor whole, part;
  std::function<fsdpp::comm::Ticket()> ours;
  std::function<void()> bare;

  [[nodiscard]] int64_t bytes() const { return whole.numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

/// Every rank can make every rank's values.
at::Tensor values_of(int rank, int64_t count, const at::Tensor& like) {
  at::manual_seed(static_cast<uint64_t>(1000 + rank));
  return at::randn({count}, like.options());
}

Case gather_case(Ranks& r, c10::ScalarType dtype, int64_t count) {
  Case c{"all_gather", dtype, count, {}, {}, {}, {}};
  c.whole = at::zeros({count * r.world.size()}, at::TensorOptions().dtype(dtype).device(r.world.device()));
  c.part = c.whole.narrow(0, count * r.world.rank(), count);
  c.part.copy_(values_of(r.world.rank(), count, c.part));
  const fsdpp::comm::Buffer out{c.whole.data_ptr(), c.whole.numel(), dtype};
  const fsdpp::comm::ConstBuffer in{c.part.data_ptr(), count, dtype};
  c.ours = [&r, out, in] { return r.ours.all_gather(out, in, r.stream, {"bench", {}}); };
  c.bare = [&r, out, in] { r.bare->all_gather(out.data, in.data, in.count, in.dtype, r.stream); };
  return c;
}

Case reduce_case(Ranks& r, c10::ScalarType dtype, int64_t count) {
  Case c{"reduce_scatter", dtype, count, {}, {}, {}, {}};
  c.part = at::zeros({count}, at::TensorOptions().dtype(dtype).device(r.world.device()));
  c.whole = values_of(r.world.rank(), count * r.world.size(), c.part);
  const fsdpp::comm::Buffer out{c.part.data_ptr(), count, dtype};
  const fsdpp::comm::ConstBuffer in{c.whole.data_ptr(), c.whole.numel(), dtype};
  c.ours = [&r, out, in] { return r.ours.reduce_scatter(out, in, fsdpp::comm::ReduceOp::Sum, r.stream, {"bench", {}}); };
  c.bare = [&r, out, in] { r.bare->reduce_scatter(out.data, in.data, out.count, in.dtype, r.stream); };
  return c;
}

bool gathered_right(const Ranks& r, const Case& c) {
  for (int rank = 0; rank < r.world.size(); ++rank)
    if (!at::equal(c.whole.narrow(0, rank * c.count, c.count), values_of(rank, c.count, c.part))) return false;
  return true;
}

// n − 1 additions, each rounded to at most half a unit in the last place of the largest sum.
bool reduced_right(const Ranks& r, const Case& c) {
  const double unit = c.dtype == at::kFloat ? 0x1p-23 : 0x1p-7;
  at::Tensor sum, magnitude;
  for (int rank = 0; rank < r.world.size(); ++rank) {
    const auto values = values_of(rank, c.whole.numel(), c.part).narrow(0, r.world.rank() * c.count, c.count).to(at::kDouble);
    sum = rank == 0 ? values : sum.add_(values);
    magnitude = rank == 0 ? values.abs() : magnitude.add_(values.abs());
  }
  return ((c.part.to(at::kDouble) - sum).abs() <= magnitude * unit * r.world.size()).all().item<bool>();
}

void wait(const Ranks& r, const fsdpp::comm::Ticket& ticket) {
  ticket.wait_host();
  bench::synchronize(r.world.device());
}

void check_values(const Ranks& r, const Settings& s, Case& c) {
  auto right = [&] { return c.op == "all_gather" ? gathered_right(r, c) : reduced_right(r, c); };
  auto refuse = [&](const char* who) {
    throw fsdpp::Error("bench_collectives: " + std::string(who) + ": wrong values from " + c.op + " of " +
                       bench::bytes_text(c.bytes()));
  };
  bench::synchronize(r.world.device());
  wait(r, c.ours());
  if (s.spoil) (c.op == "all_gather" ? c.whole : c.part).narrow(0, 0, 1).add_(1);
  if (!right()) refuse("fsdpp");
  if (r.bare == nullptr) return;
  c.bare();
  bench::synchronize(r.world.device());
  if (!right()) refuse("bare NCCL");
}

struct Samples {
  std::vector<double> us, host_us;
};

void take(Ranks& r, bench::StreamTimer& timer, const std::function<fsdpp::comm::Ticket()>& call, int calls, Samples& samples) {
  r.ours.barrier();
  bench::synchronize(r.world.device());
  fsdpp::comm::Ticket last;
  timer.start(r.stream);
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) last = call();
  const auto issued = Clock::now();
  if (!r.stream.is_cuda()) last.wait_host();
  timer.stop(r.stream);
  samples.us.push_back(timer.milliseconds() * 1e3 / calls);
  samples.host_us.push_back(bench::milliseconds(issued - begin) * 1e3 / calls);
}

bench::Spread slowest(Ranks& r, const std::vector<double>& samples) {
  return bench::spread_of(bench::largest_over_ranks(r.ours, samples));
}

int calls_of(const Settings& s, int64_t bytes) {
  const int64_t volume = s.device == "cuda" ? int64_t{4} << 30 : int64_t{16} << 20;
  return static_cast<int>(std::clamp<int64_t>(volume / bytes, 2, s.most_calls));
}

void measure(Ranks& r, const Settings& s, Case c, const bench::Report& report, bench::Table& table) {
  check_values(r, s, c);
  bench::StreamTimer timer(r.world.device());
  const auto bare_call = [&] {
    c.bare();
    return fsdpp::comm::Ticket();
  };
  const int calls = calls_of(s, c.bytes());
  Samples ours, bare;
  for (int round = -1; round < s.rounds; ++round) {  // the first warms up
    for (int turn = 0; turn < 2; ++turn) {
      if ((turn + round) % 2 == 0)
        take(r, timer, c.ours, calls, ours);
      else if (r.bare != nullptr)
        take(r, timer, bare_call, calls, bare);
    }
    if (round < 0) ours = bare = {};
  }
  const double n = r.world.size();
  auto busbw = [&](double us) { return static_cast<double>(c.bytes()) / us / 1e3 * (n - 1) / n; };
  const auto us = slowest(r, ours.us);
  bench::Row row{{"op", c.op},         {"dtype", c10::toString(c.dtype)},
                 {"bytes", c.bytes()}, {"ranks", r.world.size()},
                 {"calls", calls},     {"rounds", s.rounds}};
  bench::put(row, "us", us);
  row["host_us"] = slowest(r, ours.host_us).median;
  row["busbw_GBps"] = busbw(us.median);
  row["ratio_to_link"] = busbw(us.median) / kLinkGBps;
  std::vector<std::string> cells{c.op,
                                 bench::bytes_text(c.bytes()),
                                 fixed(us.median, 1),
                                 fixed(busbw(us.median), 1),
                                 fixed(busbw(us.median) / kLinkGBps, 3),
                                 fixed(row["host_us"], 1),
                                 "-",
                                 "-",
                                 "-",
                                 "-"};
  if (r.bare != nullptr) {
    const auto bare_us = slowest(r, bare.us);
    bench::put(row, "bare_us", bare_us);
    row["bare_host_us"] = slowest(r, bare.host_us).median;
    row["bare_busbw_GBps"] = busbw(bare_us.median);
    row["ratio_to_bare"] = bare_us.median / us.median;
    const auto at = cells.end() - 4;
    at[0] = fixed(bare_us.median, 1);
    at[1] = fixed(busbw(bare_us.median), 1);
    at[2] = fixed(row["bare_host_us"], 1);
    at[3] = fixed(row["ratio_to_bare"], 3);
  }
  report.row(row);
  table.add(std::move(cells));
}

c10::ScalarType dtype_of(const std::string& name) { return name == "bf16" ? at::kBFloat16 : at::kFloat; }

void run(const Settings& s) {
  fsdpp::comm::WorldOptions options;
  options.device = s.device == "cuda" ? c10::kCUDA : c10::kCPU;
  const auto world = fsdpp::comm::World::init(options);
  const auto comm = world->make_communicator("bench");
  const auto bare = bench::make_bare_collectives(*world);
  const fsdpp::cuda::Stream stream(world->device());
  Ranks ranks{*world, *comm, bare.get(), stream};
  auto common = bench::Row{{"bench", "collectives"}, {"machine", bench::machine(world->device())}};
  if (bare) common["machine"]["nccl"] = bare->version();
  const bench::Report report(world->rank() == 0, common);
  bench::Table table(
      {"op", "bytes", "us", "busbw GB/s", "of 450", "host us", "bare us", "bare GB/s", "bare host us", "bare/ours"});
  for (const bool gather : {true, false})
    for (int64_t bytes = s.min_bytes; bytes <= s.max_bytes; bytes *= 4) {
      const auto dtype = dtype_of(gather ? s.gather_dtype : s.reduce_dtype);
      const auto count = std::max<int64_t>(1, bytes / world->size() / static_cast<int64_t>(c10::elementSize(dtype)));
      measure(ranks, s, gather ? gather_case(ranks, dtype, count) : reduce_case(ranks, dtype, count), report, table);
    }
  report.line(std::to_string(world->size()) + " ranks, " + s.device + "; slowest rank, median of " + std::to_string(s.rounds) +
              " rounds");
  report.table(table);
}

}  // namespace

int main(int argc, char** argv) try {
  if (const auto settings = parse(argc, argv)) run(*settings);
} catch (const std::exception& e) {
  fsdpp::comm::report_failure(e.what());
  std::cerr << e.what() << "\n";
  return 1;
}

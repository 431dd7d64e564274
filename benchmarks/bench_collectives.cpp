// Bus bandwidth of all-gather and reduce-scatter by size: fsdpp's communicator and a bare NCCL loop in turns on the same buffers
// and stream. One JSON object a row, then a table. Before timing, one round of random values is checked: gathers must be equal,
// sums within the rounding of the dtype. On the CPU there is no bare loop.
//
// Formulas (S: bytes of the whole buffer, n: ranks, t: time of a call): busbw = S / t · (n − 1) / n; ratio_to_bare = t_bare / t;
// ratio_to_link = busbw / 450 GB/s, what NVLink 4 gives a GPU in one direction. t: time between two events around `calls` calls,
// divided by their number, of the slowest rank; median over the rounds. host_us: the host's time to issue a call.
// Gathers are in place, as the engine's; reductions are not.
//
// --buffers symmetric: beside them a third side, in memory that fsdpp registered (Communicator::allocate) on a communicator of its own;
// --buffers copy-engine: the same with gathers by copy engines (reductions never are). Its gathers must be equal to the plain ones bit
// by bit, its sums right to rounding. "registered" in a row says whether the machine allowed it; else it is plain memory. Waits in such
// memory can't be aborted, so run each kind as a program of its own: --limit ends one that hangs.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>

#include "bare_nccl.h"
#include "fsdpp/comm/buffers.h"
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
  std::string buffers = "plain";
  int rounds = 7, most_calls = 200, max_ctas = 0, limit_s = 60;
  bool spoil = false, spoil_symmetric = false;
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
  app.add_option("--buffers", s.buffers, "plain; or also symmetric or copy-engine")
      ->check(CLI::IsMember({"plain", "symmetric", "copy-engine"}))
      ->capture_default_str();
  app.add_option("--max-ctas", s.max_ctas, "Thread blocks of fsdpp's communicators; 0: as NCCL likes")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--limit", s.limit_s, "Seconds after which a collective counts as hanging")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--spoil", s.spoil, "Test aid: change one value before the check, which then has to fail");
  app.add_flag("--spoil-symmetric", s.spoil_symmetric, "Test aid: the same in symmetric buffers");
  if (!bench::parse(app, argc, argv)) return std::nullopt;
  return s;
}

struct Ranks {
  fsdpp::comm::World& world;
  fsdpp::comm::Communicator& ours;
  bench::BareCollectives* bare;          // null: none
  fsdpp::comm::Communicator* symmetric;  // null: none
  fsdpp::cuda::StreamView stream;
  bool registered = false;  // the symmetric one's memory
};

/// One operation on its buffers.
struct Case {
  std::string op;
  c10::ScalarType dtype = at::kFloat;
  int64_t count = 0;  // elements of one rank's part
  at::Tensor whole, part;
  at::Tensor symmetric_whole, symmetric_part;  // undefined: not asked for
  std::function<fsdpp::comm::Ticket()> ours, symmetric;
  std::function<void()> bare;

  [[nodiscard]] int64_t bytes() const { return whole.numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

/// Every rank can make every rank's values.
at::Tensor values_of(int rank, int64_t count, const at::Tensor& like) {
  at::manual_seed(static_cast<uint64_t>(1000 + rank));
  return at::randn({count}, like.options());
}

Case gather_case(Ranks& r, c10::ScalarType dtype, int64_t count) {
  Case c;
  c.op = "all_gather";
  c.dtype = dtype;
  c.count = count;
  c.whole = at::zeros({count * r.world.size()}, at::TensorOptions().dtype(dtype).device(r.world.device()));
  if (r.symmetric != nullptr) c.symmetric_whole = fsdpp::comm::allocate_tensor(*r.symmetric, c.whole.sizes(), dtype, "whole").zero_();
  const auto call_in = [&](fsdpp::comm::Communicator& comm, const at::Tensor& whole) {
    const auto part = whole.narrow(0, count * r.world.rank(), count);
    part.copy_(values_of(r.world.rank(), count, part));
    const fsdpp::comm::Buffer out{whole.data_ptr(), whole.numel(), dtype};
    const fsdpp::comm::ConstBuffer in{part.data_ptr(), count, dtype};
    return [&r, &comm, out, in] { return comm.all_gather(out, in, r.stream, {"bench", {}}); };
  };
  c.part = c.whole.narrow(0, count * r.world.rank(), count);
  c.ours = call_in(r.ours, c.whole);
  if (r.symmetric != nullptr) c.symmetric = call_in(*r.symmetric, c.symmetric_whole);
  c.bare = [&r, out = c.whole.data_ptr(), in = c.part.data_ptr(), count, dtype] {
    r.bare->all_gather(out, in, count, dtype, r.stream);
  };
  return c;
}

Case reduce_case(Ranks& r, c10::ScalarType dtype, int64_t count) {
  Case c;
  c.op = "reduce_scatter";
  c.dtype = dtype;
  c.count = count;
  c.part = at::zeros({count}, at::TensorOptions().dtype(dtype).device(r.world.device()));
  c.whole = values_of(r.world.rank(), count * r.world.size(), c.part);
  const auto call_in = [&](fsdpp::comm::Communicator& comm, const at::Tensor& whole, const at::Tensor& part) {
    const fsdpp::comm::Buffer out{part.data_ptr(), count, dtype};
    const fsdpp::comm::ConstBuffer in{whole.data_ptr(), whole.numel(), dtype};
    return [&r, &comm, out, in] { return comm.reduce_scatter(out, in, fsdpp::comm::ReduceOp::Sum, r.stream, {"bench", {}}); };
  };
  c.ours = call_in(r.ours, c.whole, c.part);
  if (r.symmetric != nullptr) {
    c.symmetric_whole = fsdpp::comm::allocate_tensor(*r.symmetric, c.whole.sizes(), dtype, "whole").copy_(c.whole);
    c.symmetric_part = fsdpp::comm::allocate_tensor(*r.symmetric, c.part.sizes(), dtype, "part").zero_();
    c.symmetric = call_in(*r.symmetric, c.symmetric_whole, c.symmetric_part);
  }
  c.bare = [&r, out = c.part.data_ptr(), in = c.whole.data_ptr(), count, dtype] {
    r.bare->reduce_scatter(out, in, count, dtype, r.stream);
  };
  return c;
}

bool gathered_right(const Ranks& r, const Case& c) {
  for (int rank = 0; rank < r.world.size(); ++rank)
    if (!at::equal(c.whole.narrow(0, rank * c.count, c.count), values_of(rank, c.count, c.part))) return false;
  return true;
}

// n − 1 additions, each rounded to at most half a unit in the last place of the largest sum.
bool reduced_right(const Ranks& r, const Case& c, const at::Tensor& part) {
  const double unit = c.dtype == at::kFloat ? 0x1p-23 : 0x1p-7;
  at::Tensor sum, magnitude;
  for (int rank = 0; rank < r.world.size(); ++rank) {
    const auto values = values_of(rank, c.whole.numel(), c.part).narrow(0, r.world.rank() * c.count, c.count).to(at::kDouble);
    sum = rank == 0 ? values : sum.add_(values);
    magnitude = rank == 0 ? values.abs() : magnitude.add_(values.abs());
  }
  return ((part.to(at::kDouble) - sum).abs() <= magnitude * unit * r.world.size()).all().item<bool>();
}

void wait(const Ranks& r, const fsdpp::comm::Ticket& ticket) {
  ticket.wait_host();
  bench::synchronize(r.world.device());
}

void spoil_first(const at::Tensor& values) { values.narrow(0, 0, 1).add_(1); }

void check_values(const Ranks& r, const Settings& s, Case& c) {
  const bool gathers = c.op == "all_gather";
  auto right = [&] { return gathers ? gathered_right(r, c) : reduced_right(r, c, c.part); };
  auto refuse = [&](const char* who) {
    throw fsdpp::Error("bench_collectives: " + std::string(who) + ": wrong values from " + c.op + " of " +
                       bench::bytes_text(c.bytes()));
  };
  bench::synchronize(r.world.device());
  wait(r, c.ours());
  if (s.spoil) spoil_first(gathers ? c.whole : c.part);
  if (!right()) refuse("fsdpp");
  if (c.symmetric) {
    wait(r, c.symmetric());
    if (s.spoil_symmetric) spoil_first(gathers ? c.symmetric_whole : c.symmetric_part);
    if (!(gathers ? at::equal(c.symmetric_whole, c.whole) : reduced_right(r, c, c.symmetric_part))) refuse("symmetric buffers");
  }
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

struct Side {
  std::string prefix;  ///< of its figures in a row
  std::function<fsdpp::comm::Ticket()> call;
  Samples samples = {};
};

std::vector<Side> sides_of(const Ranks& r, const Case& c) {
  std::vector<Side> sides{{"", c.ours}};
  if (c.symmetric) sides.push_back({"symmetric_", c.symmetric});
  if (r.bare != nullptr)
    sides.push_back({"bare_", [&c] {
                       c.bare();
                       return fsdpp::comm::Ticket();
                     }});
  return sides;
}

std::vector<Side> take_turns(Ranks& r, const Settings& s, const Case& c, int calls) {
  auto sides = sides_of(r, c);
  bench::StreamTimer timer(r.world.device());
  for (int round = -1; round < s.rounds; ++round) {  // the first warms up
    for (size_t turn = 0; turn < sides.size(); ++turn) {
      auto& side = sides[(turn + static_cast<size_t>(round + 1)) % sides.size()];
      take(r, timer, side.call, calls, side.samples);
    }
    if (round < 0)
      for (auto& side : sides) side.samples = {};
  }
  return sides;
}

void measure(Ranks& r, const Settings& s, Case c, const bench::Report& report, bench::Table& table) {
  check_values(r, s, c);
  const int calls = calls_of(s, c.bytes());
  const double n = r.world.size();
  auto busbw = [&](double us) { return static_cast<double>(c.bytes()) / us / 1e3 * (n - 1) / n; };
  bench::Row row{{"op", c.op},         {"dtype", c10::toString(c.dtype)}, {"bytes", c.bytes()},       {"ranks", r.world.size()},
                 {"calls", calls},     {"rounds", s.rounds},              {"max_ctas", s.max_ctas}};
  std::map<std::string, bench::Spread> us;
  for (const auto& side : take_turns(r, s, c, calls)) {
    us[side.prefix] = slowest(r, side.samples.us);
    bench::put(row, side.prefix + "us", us[side.prefix]);
    row[side.prefix + "host_us"] = slowest(r, side.samples.host_us).median;
    row[side.prefix + "busbw_GBps"] = busbw(us[side.prefix].median);
  }
  row["ratio_to_link"] = busbw(us[""].median) / kLinkGBps;
  if (us.contains("bare_")) row["ratio_to_bare"] = us["bare_"].median / us[""].median;
  if (us.contains("symmetric_")) {
    row["buffers"] = s.buffers;
    row["registered"] = r.registered;
    row["symmetric_ratio_to_plain"] = us[""].median / us["symmetric_"].median;
  }
  report.row(row);
  auto cell = [&](const std::string& key, int digits) {
    return row.contains(key) ? fixed(row[key].get<double>(), digits) : std::string("-");
  };
  table.add({c.op, bench::bytes_text(c.bytes()), fixed(us[""].median, 1), cell("busbw_GBps", 1), cell("ratio_to_link", 3),
             cell("host_us", 1), us.contains("bare_") ? fixed(us["bare_"].median, 1) : "-", cell("bare_busbw_GBps", 1), cell("bare_host_us", 1),
             cell("ratio_to_bare", 3), us.contains("symmetric_") ? fixed(us["symmetric_"].median, 1) : "-", cell("symmetric_busbw_GBps", 1),
             cell("symmetric_ratio_to_plain", 3)});
}

c10::ScalarType dtype_of(const std::string& name) { return name == "bf16" ? at::kBFloat16 : at::kFloat; }

void run(const Settings& s) {
  fsdpp::comm::WorldOptions options;
  options.device = s.device == "cuda" ? c10::kCUDA : c10::kCPU;
  options.collective_timeout = std::chrono::seconds(s.limit_s);
  const auto world = fsdpp::comm::World::init(options);
  const auto comm = world->make_communicator("bench", {}, {.max_ctas = s.max_ctas});
  std::shared_ptr<fsdpp::comm::Communicator> symmetric;
  if (s.buffers != "plain")
    symmetric = world->make_communicator("bench.symmetric", {}, {.copy_engine = s.buffers == "copy-engine", .max_ctas = s.max_ctas});
  const auto bare = bench::make_bare_collectives(*world);
  const fsdpp::cuda::Stream stream(world->device());
  Ranks ranks{*world, *comm, bare.get(), symmetric.get(), stream};
  if (symmetric) ranks.registered = symmetric->allocate(4096, {.label = "probe"}).registered;
  auto common = bench::Row{{"bench", "collectives"}, {"machine", bench::machine(world->device())}};
  if (bare) common["machine"]["nccl"] = bare->version();
  const bench::Report report(world->rank() == 0, common);
  bench::Table table(
      {"op", "bytes", "us", "busbw GB/s", "of 450", "host us", "bare us", "bare GB/s", "bare host us", "bare/ours",
       s.buffers == "plain" ? "symmetric us" : s.buffers + " us", "GB/s", "plain/it"});
  for (const bool gather : {true, false}) {
    if (!gather && s.buffers == "copy-engine") continue;
    for (int64_t bytes = s.min_bytes; bytes <= s.max_bytes; bytes *= 4) {
      const auto dtype = dtype_of(gather ? s.gather_dtype : s.reduce_dtype);
      const auto count = std::max<int64_t>(1, bytes / world->size() / static_cast<int64_t>(c10::elementSize(dtype)));
      measure(ranks, s, gather ? gather_case(ranks, dtype, count) : reduce_case(ranks, dtype, count), report, table);
    }
  }
  report.line(std::to_string(world->size()) + " ranks, " + s.device + "; slowest rank, median of " + std::to_string(s.rounds) +
              " rounds" + (symmetric ? ranks.registered ? "; buffers are registered" : "; buffers could not be registered" : ""));
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

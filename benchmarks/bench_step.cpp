// Time, memory and use of the device of a training step of MiniLLM, by variants in turns within one process: sharded by
// fsdpp, plain LibTorch without sharding, and so on (step_variants.h). One JSON object a row, then a table. All
// variants start from the same weights and take the same random tokens; before timing, their first losses are compared.
//
// Formulas. step_ms: wall time from before a step to the device's end of it, as in the Python peer; median over all
// turns, of the slowest rank. host_ms: until the calls returned. flow_ms: steps in a row without waiting between them.
// tokens_per_s: of one rank, from step_ms. mfu_989: flops / step_ms / 989 TFLOP/s, flops = (6·(parameters − embedding)
// + 12·layers·dim·seq)·tokens. mfu_products: the same against the rate of the step's own matrix products, timed alone
// in this run on values of unit variance. peak_bytes: most bytes of tensors at once in the steps before timing, without
// what the other variants hold. device_allocs: cudaMalloc calls in all timed steps.
//
// --simulate-ranks W: this process plays rank 0 of W on a modelled network (fsdpp/comm/simulated_world.h), with the
// buffers of W ranks. exposed_ms: step_ms less that of the same steps, in turns with them, on a network that takes no
// time; communication_ms: the model's delays in a step; overlap: 1 - exposed / communication; both wires' delays add
// up, so that a mesh that replicates may overlap more. Values are not those of training, so losses are not compared.
#include <ATen/ops/empty.h>

#include <cmath>
#include <iostream>
#include <map>

#include "fsdpp/comm/simulated_world.h"
#include "product_rate.h"
#include "shapes.h"
#include "step_variants.h"
#include "support/device.h"
#include "support/options.h"
#include "support/ranks.h"
#include "trainer.h"

namespace {

using bench::fixed;
using Clock = std::chrono::steady_clock;
constexpr int kComparedSteps = 6;  // a StepGraph replays from its fourth on

struct Settings {
  std::string shape = "seed", device = "cpu", precision;
  std::vector<std::string> variants;
  minillm::Options model;
  int turns = 3, steps = 10, warmup = kComparedSteps;
  double product_ms = 100;
  bool products = true, spoil = false;
  fsdpp::comm::SimulatedOptions fabric{.ranks = 0};  // 0: no simulation
  double bandwidth = fabric.within.bytes_per_s / 1e9, latency = fabric.within.latency_s * 1e6;
  double node_bandwidth = fabric.between.bytes_per_s / 1e9, node_latency = fabric.between.latency_s * 1e6;
  int replicas = 1;
};

void add_flags(CLI::App& app, Settings& s) {
  auto& o = s.model;
  bench::add_device_flag(app, s.device);
  app.add_option("--shape", s.shape,
                 "seed (735 M parameters, 8 x 1024 tokens), half (dim 1024), launch (24 layers of 256, 1 x 64) or tiny; the "
                 "flags below change it")
      ->capture_default_str();
  app.add_option("--vocab", o.model.vocab, "Token ids");
  app.add_option("--dim", o.model.dim, "Width");
  app.add_option("--layers", o.model.layers, "Blocks");
  app.add_option("--heads", o.model.heads, "Attention heads");
  app.add_option("--batch", o.batch, "Samples on each rank");
  app.add_option("--seq", o.seq, "Tokens of a sample");
  app.add_flag("--recompute", o.model.recompute, "Keep each block's input only");
  app.add_option("--replicate", s.replicas, "Of simulated ranks: groups that each hold the whole model, sharded within")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--precision", s.precision, "bf16 or fp32; bf16 on cuda, fp32 on cpu")->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--variants", s.variants, "Names, separated by commas; if not given all but those with symmetric buffers")->delimiter(',');
  app.add_option("--turns", s.turns, "Turns of each variant")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", s.steps, "Steps of a turn, once waiting after each and once in a row")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--warmup", s.warmup, "Steps before timing")->check(CLI::Range(kComparedSteps, 1000))->capture_default_str();
  app.add_flag("!--no-products", s.products, "Don't time the matrix products alone");
  app.add_option("--product-ms", s.product_ms, "How long each product is repeated")->capture_default_str();
  app.add_option("--simulate-ranks", s.fabric.ranks, "Play rank 0 of so many on a modelled network")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--bandwidth", s.bandwidth, "Of the simulated network within a node, GB/s each way")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--latency", s.latency, "Of a hop within a node, us")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--node-bandwidth", s.node_bandwidth, "Between nodes, GB/s of the adapter that each rank has")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--node-latency", s.node_latency, "Of a hop between nodes, us")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--ranks-per-node", s.fabric.ranks_per_node, "Of the simulated network")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--spoil", s.spoil, "Test aid: change one loss before the comparison, which then has to fail");
}

std::optional<Settings> parse(int argc, char** argv) {
  Settings s;
  {  // the shape first, since other flags change it
    CLI::App app("", "bench_step");
    Settings shape_only;
    app.allow_extras();
    app.set_help_flag();
    app.add_option("--shape", shape_only.shape);
    if (!bench::parse(app, argc, argv)) return std::nullopt;
    s.shape = shape_only.shape;
    bench::use_shape(s.model, s.shape);
  }
  CLI::App app("Training steps of MiniLLM by variants.", "bench_step");
  add_flags(app, s);
  if (!bench::parse(app, argc, argv)) return std::nullopt;
  s.model.cuda = s.device == "cuda";
  const bool bf16 = s.precision.empty() ? s.model.cuda : s.precision == "bf16";
  s.model.precision = bf16 ? minillm::Precision::BF16 : minillm::Precision::FP32;
  s.model.synthetic = true;
  if (s.variants.empty())
    for (const auto& v : bench::step_variants())
      if (!v.only_by_name && (s.model.cuda || !v.cuda_only) && (s.fabric.ranks == 0 || v.sharded)) s.variants.push_back(v.name);
  if (s.replicas > 1 && s.fabric.ranks == 0)
    throw fsdpp::ConfigError("bench_step: --replicate belongs to --simulate-ranks. Try: give both");
  s.fabric.device = s.model.cuda ? c10::kCUDA : c10::kCPU;
  s.fabric.within = {.bytes_per_s = s.bandwidth * 1e9, .latency_s = s.latency * 1e-6};
  s.fabric.between = {.bytes_per_s = s.node_bandwidth * 1e9, .latency_s = s.node_latency * 1e-6};
  return s;
}

/// A few batches of random tokens on the device, taken in turn.
std::vector<minillm::Batch> make_batches(const minillm::Options& options, const minillm::Place& place, int count) {
  const auto source = minillm::make_batches(options, place);
  std::vector<minillm::Batch> batches;
  for (int m = 0; m < count; ++m) {
    auto inputs = at::empty({options.batch, options.seq}, at::kLong), targets = at::empty_like(inputs);
    const auto n = static_cast<size_t>(inputs.numel());
    source->fill(m, {inputs.data_ptr<int64_t>(), n}, {targets.data_ptr<int64_t>(), n});
    batches.push_back({inputs.to(place.device), targets.to(place.device)});
  }
  return batches;
}

struct Samples {
  std::vector<double> wall, host, flow;
};

class Entry {
 public:
  Entry(const bench::Variant& variant, const Settings& settings, const minillm::Place& place,
        const std::vector<minillm::Batch>& batches)
      : variant_(variant), device_(place.device), batches_(batches) {
    bench::synchronize(device_);
    const auto before = bench::allocator_stats(device_).allocated;
    stepper_ = variant.make({settings.model, place, batches.front()});
    bench::synchronize(device_);
    bench::reset_peak(device_);
    for (int i = 0; i < settings.warmup; ++i) losses_.push_back(next().item<double>());
    const auto after = bench::allocator_stats(device_);
    const auto registered = stepper_->registered_bytes();
    peak_ = after.peak - before + registered;
    resident_ = after.allocated - before + registered;
  }

  /// Not timed: steps that find blocks again which another variant's turn has cut up.
  static constexpr int kWarmUps = 2;
  static int64_t steps_of_turn(int steps) { return kWarmUps + 2 * steps; }
  void turn(int steps, Samples& samples) {
    for (int i = 0; i < kWarmUps; ++i) static_cast<void>(next());
    bench::synchronize(device_);
    const auto allocs = bench::allocator_stats(device_).device_allocs;
    for (int i = 0; i < steps; ++i) {
      bench::synchronize(device_);
      const auto start = Clock::now();
      const auto loss = next();
      const auto issued = Clock::now();
      bench::synchronize(device_);
      samples.wall.push_back(bench::milliseconds(Clock::now() - start));
      samples.host.push_back(bench::milliseconds(issued - start));
    }
    const auto start = Clock::now();
    at::Tensor loss;
    for (int i = 0; i < steps; ++i) loss = next();
    bench::synchronize(device_);
    samples.flow.push_back(bench::milliseconds(Clock::now() - start) / steps);
    allocs_ += bench::allocator_stats(device_).device_allocs - allocs;
    losses_.push_back(loss.item<double>());
  }

  [[nodiscard]] const bench::Variant& variant() const { return variant_; }
  [[nodiscard]] const std::vector<double>& losses() const { return losses_; }
  void spoil() { losses_.front() *= 1.05; }
  [[nodiscard]] int64_t peak() const { return peak_; }
  [[nodiscard]] int64_t resident() const { return resident_; }
  [[nodiscard]] int64_t allocs() const { return allocs_; }

  Samples samples;
  Samples without_delays;  ///< on a simulated network
  double wire_ms = 0;      ///< the model's delays of all timed steps

 private:
  at::Tensor next() { return stepper_->step(batches_[static_cast<size_t>(steps_++) % batches_.size()]); }

  const bench::Variant& variant_;
  c10::Device device_;
  const std::vector<minillm::Batch>& batches_;
  std::unique_ptr<bench::Stepper> stepper_;
  std::vector<double> losses_;
  int64_t peak_ = 0, resident_ = 0, allocs_ = 0, steps_ = 0;
};

/// Equal weights and tokens give equal losses but for rounding: of all first steps on one rank, of the first where others'
/// gradients join.
void compare_losses(const Settings& s, int world, const std::vector<std::unique_ptr<Entry>>& entries) {
  if (s.spoil) entries.front()->spoil();
  const double tolerance = s.model.precision == minillm::Precision::BF16 ? 1e-2 : 1e-4;
  const Entry* reference = nullptr;
  for (const auto& e : entries) {
    if (e->variant().steps_when_made > 0) continue;
    if (reference == nullptr) reference = e.get();
    for (size_t i = 0; i < (world == 1 ? kComparedSteps : 1); ++i)
      if (const double a = reference->losses()[i], b = e->losses()[i]; std::abs(a - b) > tolerance * std::abs(a))
        throw fsdpp::Error("bench_step: step " + std::to_string(i) + ": loss " + fixed(b, 5) + " of " + e->variant().name +
                           " differs from " + fixed(a, 5) + " of " + reference->variant().name);
  }
}

/// No time of steps that went wrong later on: NaN makes products faster.
void check_finite(const std::vector<std::unique_ptr<Entry>>& entries) {
  for (const auto& e : entries)
    for (const double loss : e->losses())
      if (!std::isfinite(loss)) throw fsdpp::Error("bench_step: " + e->variant().name + ": the loss is not finite");
}

struct Context {
  const Settings& settings;
  const minillm::Place& place;
  const bench::Report& report;
  bool simulated;
  std::optional<bench::ProductRate> products;

  [[nodiscard]] double tokens() const { return static_cast<double>(settings.model.batch * settings.model.seq); }
  [[nodiscard]] double flops() const { return minillm::flops_per_token(settings.model.model, settings.model.seq) * tokens(); }
  [[nodiscard]] bench::Spread slowest(const std::vector<double>& samples) const {
    return bench::spread_of(bench::largest_over_ranks(place.mesh->reduce_comm(), samples));
  }
};

bench::Row simulated_row(const Context& c, const Entry& entry, double step_ms) {
  const double without = bench::spread_of(entry.without_delays.wall).median;
  const double exposed = step_ms - without;
  const double communication =
      entry.wire_ms / static_cast<double>(2 * c.settings.turns * Entry::steps_of_turn(c.settings.steps));  // with delays and without
  std::optional<double> overlap;
  if (communication > 0) overlap = 1 - exposed / communication;
  c.report.line(entry.variant().name + " on " + std::to_string(c.place.world_size) + " simulated ranks" +
                (c.settings.replicas > 1 ? " in " + std::to_string(c.settings.replicas) + " replicas" : "") +
                ": exposed communication " + fixed(exposed, 3) + " ms of a step of " + fixed(step_ms, 3) + " ms (" +
                fixed(100 * exposed / step_ms, 2) + " %); on the wire by the model " + fixed(communication, 3) +
                " ms, hidden " + (overlap ? fixed(100 * *overlap, 1) + " %" : "-"));
  return {{"simulated_ranks", c.place.world_size},      {"bandwidth_GBps", c.settings.bandwidth},
          {"latency_us", c.settings.latency},           {"node_bandwidth_GBps", c.settings.node_bandwidth},
          {"node_latency_us", c.settings.node_latency}, {"ranks_per_node", c.settings.fabric.ranks_per_node},
          {"step_ms_without_delays", without},          {"exposed_ms", exposed},
          {"communication_ms", communication},          {"overlap", overlap ? bench::Row(*overlap) : bench::Row()}};
}

void report_entry(const Context& c, const Entry& entry, std::map<std::string, double>& medians, bench::Table& table) {
  const auto ms = c.slowest(entry.samples.wall), host = c.slowest(entry.samples.host), flow = c.slowest(entry.samples.flow);
  medians[entry.variant().name] = ms.median;
  const double rate = c.flops() / ms.median * 1e3;
  bench::Row row{{"variant", entry.variant().name}, {"what", entry.variant().what}, {"samples", ms.count}};
  bench::put(row, "step_ms", ms);
  bench::put(row, "flow_ms", flow);
  bench::put(row, "host_ms", host);
  row["tokens_per_s"] = c.tokens() / ms.median * 1e3;
  if (c.settings.model.cuda) row["mfu_989"] = rate / bench::kPeakFlops;
  if (c.products) row["mfu_products"] = rate / c.products->flops_per_s;
  row["peak_bytes"] = entry.peak();
  row["resident_bytes"] = entry.resident();
  row["device_allocs"] = entry.allocs();
  row["first_loss"] = entry.losses().front();
  row["last_loss"] = entry.losses().back();
  const auto plain = medians.find("plain");
  if (plain != medians.end()) row["ratio_to_plain"] = ms.median / plain->second;
  if (c.simulated) row.update(simulated_row(c, entry, ms.median));
  c.report.row(row);
  table.add({entry.variant().name, fixed(ms.median, 2), fixed(ms.min, 2) + ".." + fixed(ms.max, 2),
             fixed(flow.median, 2), fixed(host.median, 2), fixed(row["tokens_per_s"], 0),
             c.settings.model.cuda ? fixed(rate / bench::kPeakFlops, 3) : "-",
             c.products ? fixed(rate / c.products->flops_per_s, 3) : "-",
             fixed(static_cast<double>(entry.peak()) / 1e9, 2), std::to_string(entry.allocs()),
             plain != medians.end() ? fixed(ms.median / plain->second, 3) : "-"});
}

void report_products(Context& c) {
  const auto dtype = c.settings.model.precision == minillm::Precision::BF16 ? at::kBFloat16 : at::kFloat;
  c.products = bench::product_rate(c.settings.model.model, c.settings.model.batch * c.settings.model.seq, c.place.device, dtype,
                                   c.settings.product_ms);
  c.report.row(
      {{"variant", "products alone"}, {"ms_per_step", c.products->ms_per_step}, {"tflops", c.products->flops_per_s / 1e12}});
  c.report.line("matrix products of a step, alone: " + fixed(c.products->ms_per_step, 2) + " ms, " +
                fixed(c.products->flops_per_s / 1e12, 0) + " TFLOP/s");
}

bench::Row common_of(const Settings& s, const minillm::Place& place) {
  const auto& m = s.model.model;
  return {{"bench", "step"},
          {"shape", s.shape},
          {"world", place.world_size},
          {"replicas", s.replicas},
          {"device", s.device},
          {"precision", s.model.precision == minillm::Precision::BF16 ? "bf16" : "fp32"},
          {"parameters", minillm::parameter_count(m)},
          {"vocab", m.vocab},
          {"dim", m.dim},
          {"layers", m.layers},
          {"heads", m.heads},
          {"recompute", m.recompute},
          {"batch", s.model.batch},
          {"seq", s.model.seq},
          {"machine", bench::machine(place.device)}};
}

struct Where {
  minillm::Place place;
  std::shared_ptr<fsdpp::comm::SimulatedWorld> simulated;
};

Where find_place(const Settings& s) {
  if (s.fabric.ranks == 0) return {minillm::find_place(s.model), nullptr};
  auto world = fsdpp::comm::SimulatedWorld::make(s.fabric);
  return {{fsdpp::comm::Mesh::hybrid(world, s.replicas), world->device(), 0, world->size()}, world};
}

void take_turns(const Settings& s, const std::vector<std::unique_ptr<Entry>>& entries, fsdpp::comm::SimulatedWorld* simulated) {
  for (int turn = 0; turn < s.turns; ++turn)
    for (const auto& entry : entries) {
      if (simulated != nullptr) simulated->reset_use();
      entry->turn(s.steps, entry->samples);
      if (simulated == nullptr) continue;
      simulated->set_delays(false);
      entry->turn(s.steps, entry->without_delays);
      simulated->set_delays(true);
      for (const auto& [name, use] : simulated->use()) entry->wire_ms += use.seconds * 1e3;
    }
}

void run(const Settings& s) {
  const auto [place, simulated] = find_place(s);
  const bench::Report report(place.rank == 0, common_of(s, place));
  Context context{s, place, report, simulated != nullptr, {}};
  const auto batches = make_batches(s.model, place, 4);
  std::vector<std::unique_ptr<Entry>> entries;
  for (const auto& name : s.variants) entries.push_back(std::make_unique<Entry>(bench::step_variant(name), s, place, batches));
  check_finite(entries);
  if (simulated == nullptr) compare_losses(s, place.world_size, entries);
  take_turns(s, entries, simulated.get());
  check_finite(entries);
  if (s.products) report_products(context);
  std::map<std::string, double> medians;
  for (const auto& e : entries)
    if (e->variant().name == "plain") medians["plain"] = context.slowest(e->samples.wall).median;
  bench::Table table({"variant", "step ms", "min..max", "flow ms", "host ms", "tokens/s", "MFU 989", "MFU products", "peak GB",
                      "cudaMallocs", "to plain"});
  for (const auto& entry : entries) report_entry(context, *entry, medians, table);
  report.line("shape " + s.shape + ", " + std::to_string(place.world_size) + (simulated ? " simulated" : "") +
              (place.world_size == 1 ? " rank" : " ranks"));
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

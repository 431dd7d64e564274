// Peak memory of training steps of MiniLLM beside the printed formula, and whether the steady state asks the device for
// memory. By shape: resharding after forward, keeping gathered parameters, accumulating gradients, recomputing
// activations; lean, fast and bf16 as bench_step's variants. One JSON object a row, then a table; fails if a figure is
// off.
//
// Formulas. formula_bytes: the total of minillm --dry-run (minillm::MemoryPlan); the engine's part
// (fsdpp::memory_formula of the model) must equal what the dry run computes from sizes alone. peak_bytes: most bytes of
// tensors at once in the steps after the model was built, as they were asked for, without what libraries keep
// (MemoryPlan::libraries: taken by a small model before); goal: formula ± 1 %. allocated_peak_bytes: the same in blocks
// of LibTorch's allocator, which are up to 1 MiB larger than what was asked for. resident_bytes: between steps;
// resident_formula: shards (in 16 bits too where kept) + optimizer + reserved_buffer_bytes. device_allocs (CUDA):
// cudaMalloc calls in the steps after the second; goal 0.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <iostream>

#include "dry_run.h"
#include "fsdpp/api/unit_handle.h"
#include "fsdpp/comm/world.h"
#include "shapes.h"
#include "support/cpu_memory.h"
#include "support/device.h"
#include "support/options.h"
#include "trainer.h"

namespace {

using bench::fixed;

struct Settings {
  std::string device = "cpu";
  std::vector<std::string> shapes{"seed", "half", "launch"};
  double tolerance = 0.01;
  bool spoil = false;
};

std::optional<Settings> parse(int argc, char** argv) {
  Settings s;
  CLI::App app("Peak memory of MiniLLM beside the printed formula.", "bench_memory");
  bench::add_device_flag(app, s.device);
  app.add_option("--shapes", s.shapes, "seed, half, launch, small, tiny; by commas")->delimiter(',')->capture_default_str();
  app.add_option("--tolerance", s.tolerance, "How far peak and formula may be apart, as a part of the formula")
      ->capture_default_str();
  app.add_flag("--spoil", s.spoil, "Test aid: a formula of 1.05 times, which then has to be off");
  if (!bench::parse(app, argc, argv)) return std::nullopt;
  return s;
}

struct Case {
  std::string shape, name;
  minillm::Options options;
  bool reshard = true;
};

std::vector<Case> cases_of(const Settings& s) {
  std::vector<Case> cases;
  for (const auto& shape : s.shapes) {
    minillm::Options o;
    o.cuda = s.device == "cuda";
    o.precision = o.cuda ? minillm::Precision::BF16 : minillm::Precision::FP32;
    o.synthetic = true;
    bench::use_shape(o, shape);
    cases.push_back({shape, "reshards", o});
    cases.push_back({shape, "keeps gathered", o, false});
    cases.push_back({shape, "accumulates 2", o});
    cases.back().options.grad_accum = 2;
    cases.push_back({shape, "recomputes", o});
    cases.back().options.model.recompute = true;
    cases.push_back({shape, "lean", o});
    cases.back().options.step_in_backward = cases.back().options.model.recompute_norms = true;
    cases.push_back({shape, "fast", o});
    cases.back().options.step_in_backward = cases.back().options.keep_cast_shard = true;
    if (o.precision != minillm::Precision::BF16) continue;
    cases.push_back(cases.back());
    cases.back().name = "fast, bf16";
    cases.back().options.reduce_bf16 = true;
  }
  return cases;
}

/// Trains as minillm does.
class Training {
 public:
  Training(const Case& c, const minillm::Place& place)
      : options_(c.options), model_(minillm::build_model(c.options, place)), optimizer_(*model_, {.lr = c.options.lr}) {
    if (!c.reshard) fsdpp::unit_of(*model_).set_reshard_after_forward(false);
    if (options_.step_in_backward) optimizer_.step_in_backward(*model_);
    auto inputs = at::empty({options_.batch, options_.seq}, at::kLong), targets = at::empty_like(inputs);
    const auto n = static_cast<size_t>(inputs.numel());
    minillm::make_batches(options_, place)->fill(0, {inputs.data_ptr<int64_t>(), n}, {targets.data_ptr<int64_t>(), n});
    batch_ = {inputs.to(place.device), targets.to(place.device)};
  }

  void step() {
    optimizer_.zero_grad();
    const auto k = options_.grad_accum;
    for (int64_t micro = 0; micro < k; ++micro) {
      if (k > 1) fsdpp::unit_of(*model_).set_requires_gradient_sync(micro + 1 == k);
      const auto loss = minillm::mean_loss(model_, batch_.inputs, batch_.targets);
      (k > 1 ? loss / k : loss).backward();
    }
    optimizer_.step();
  }
  void between_steps() { optimizer_.zero_grad(); }

  [[nodiscard]] const minillm::MiniLLM& model() const { return model_; }
  [[nodiscard]] int64_t optimizer_bytes() const { return optimizer_.state_bytes(); }

 private:
  const minillm::Options& options_;
  minillm::MiniLLM model_;
  fsdpp::optim::AdamW optimizer_;
  minillm::Batch batch_;
};

struct Figures {
  fsdpp::MemoryFormula engine;
  int64_t formula = 0, peak = 0, resident = 0, resident_formula = 0, reserved = 0, allocated_peak = 0,
          device_allocs = 0;
};

bench::AllocatorStats stats_of(c10::Device device, const bench::CpuMemory& on_cpu) {
  if (device.is_cuda()) return bench::allocator_stats(device);
  return {.allocated = on_cpu.now(), .peak = on_cpu.peak(), .requested = on_cpu.now(), .requested_peak = on_cpu.peak()};
}

/// So that nothing is counted that LibTorch and its libraries take once.
void warm_up(const Case& like, const minillm::Place& place) {
  auto c = like;
  bench::use_shape(c.options, "tiny");
  Training training(c, place);
  training.step();
  bench::synchronize(place.device);
}

Figures measure(const Case& c, const minillm::Place& place) {
  constexpr int kFirst = 2, kSteady = 3;
  const auto device = place.device;
  warm_up(c, place);
  bench::CpuMemory on_cpu;
  bench::release_cached(device);
  const auto before = stats_of(device, on_cpu);
  Training training(c, place);
  bench::synchronize(device);
  bench::reset_peak(device);
  on_cpu.reset_peak();
  for (int i = 0; i < kFirst; ++i) training.step();
  bench::synchronize(device);
  const auto allocs = bench::allocator_stats(device).device_allocs;
  for (int i = 0; i < kSteady; ++i) training.step();
  training.between_steps();
  bench::synchronize(device);
  const auto after = stats_of(device, on_cpu);

  Figures f;
  f.engine = fsdpp::memory_formula(*training.model(), c.options.grad_accum > 1);
  auto plan = minillm::memory_plan(c.options, place.world_size);
  if (c.reshard && plan.engine.total() != f.engine.total())
    throw fsdpp::Error("bench_memory: " + c.shape + ", " + c.name + ": the dry run says " + std::to_string(plan.engine.total()) +
                       " bytes of the engine, the model " + std::to_string(f.engine.total()));
  plan.engine = f.engine;
  f.formula = plan.total() - plan.libraries;
  f.reserved = fsdpp::reserved_buffer_bytes(*training.model());
  f.resident_formula = f.engine.shards + f.engine.cast_shards + training.optimizer_bytes() + f.reserved;
  f.peak = after.requested_peak - before.requested;
  f.resident = after.requested - before.requested;
  f.allocated_peak = after.peak - before.allocated;
  f.device_allocs = after.device_allocs - allocs;
  return f;
}

/// What is wrong, or nothing.
std::string verdict(const Settings& s, const Figures& f) {
  std::string text;
  auto add = [&](const std::string& what) { text += (text.empty() ? "" : "; ") + what; };
  auto off = [&](double measured, double formula) {
    return std::abs(measured / (formula * (s.spoil ? 1.05 : 1.0)) - 1) > s.tolerance;
  };
  const auto limit = " off by more than " + fixed(100 * s.tolerance, 1) + " %";
  const auto buffers = f.engine.gathered + f.engine.gradients + f.engine.staging;
  if (f.reserved > buffers) add("more buffers than the formula's");
  if (buffers > 0 && off(static_cast<double>(f.reserved), static_cast<double>(buffers))) add("buffers" + limit);
  if (off(static_cast<double>(f.peak), static_cast<double>(f.formula))) add("peak" + limit);
  if (off(static_cast<double>(f.resident), static_cast<double>(f.resident_formula))) add("resident" + limit);
  if (f.device_allocs > 0) add("cudaMalloc in the steady state");
  return text;
}

void report_case(const Settings& s, const Case& c, const Figures& f, const bench::Report& report, bench::Table& table) {
  const auto wrong = verdict(s, f);
  auto gb = [](int64_t bytes) { return fixed(static_cast<double>(bytes) / 1e9, 3); };
  auto ratio = [](int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  bench::Row row{{"shape", c.shape},
                 {"case", c.name},
                 {"batch", c.options.batch},
                 {"seq", c.options.seq},
                 {"formula_bytes", f.formula},
                 {"engine_bytes", f.engine.total()},
                 {"reserved_buffer_bytes", f.reserved},
                 {"peak_bytes", f.peak},
                 {"peak_to_formula", ratio(f.peak, f.formula)},
                 {"allocated_peak_bytes", f.allocated_peak},
                 {"resident_bytes", f.resident},
                 {"resident_formula", f.resident_formula},
                 {"device_allocs", f.device_allocs},
                 {"ok", wrong.empty()}};
  if (!wrong.empty()) row["wrong"] = wrong;
  report.row(row);
  table.add({c.shape + ", " + c.name, gb(f.peak), gb(f.formula), fixed(ratio(f.peak, f.formula), 4),
             gb(f.allocated_peak), gb(f.resident), gb(f.resident_formula), gb(f.reserved),
             std::to_string(f.device_allocs), wrong.empty() ? "ok" : wrong});
}

bool run(const Settings& s) {
  const auto cases = cases_of(s);
  const auto place = minillm::find_place(cases.front().options);
  const bench::Report report(place.rank == 0,
                             {{"bench", "memory"}, {"world", place.world_size}, {"machine", bench::machine(place.device)}});
  bench::Table table({"case", "peak GB", "formula GB", "ratio", "in blocks GB", "resident GB", "its formula",
                      "buffers GB", "cudaMallocs", ""});
  bool good = true;
  for (const auto& c : cases) {
    const auto figures = measure(c, place);
    report_case(s, c, figures, report, table);
    good = good && verdict(s, figures).empty();
  }
  report.table(table);
  return good;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto settings = parse(argc, argv);
  return settings && !run(*settings) ? 1 : 0;
} catch (const std::exception& e) {
  fsdpp::comm::report_failure(e.what());
  std::cerr << e.what() << "\n";
  return 1;
}

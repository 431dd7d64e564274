// A fixed set of kernels under this library's profiler, for comparison with other tools that look at the same kernels:
//   profiler_kernels run [calls]            just runs them, for an external tool such as ncu
//   profiler_kernels times FILE [calls]     their times by CUPTI records
//   profiler_kernels counters FILE          hardware counters and verdicts of one product and one copy kernel
//   profiler_kernels samples FILE           the same by PM sampling
// FILE gets JSON: {"calls": …, "kernels": {name: [ns, …]}} for times, with a pause after each call; {"source": …, "kernels": {name: {…}}} for counters. `run` and
// `counters` take the two kernels alone, `times` all of benchmarks/peers/torch_profiler_kernels.py.
#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/profiler/ceilings.h"
#include "fsdpp/profiler/profiler.h"
#include "fsdpp/profiler/report.h"
#include "fsdpp/profiler/step_counters.h"

namespace {

using namespace fsdpp::profiler;
using Json = nlohmann::json;

constexpr int kWarmUps = 20;

at::TensorOptions on_gpu(at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(at::kCUDA); }

/// A product that is bound by compute and a copy (fp32 to bf16, so that it is a kernel) that is bound by memory.
struct Pair {
  at::Tensor a = at::randn({8192, 8192}, on_gpu(at::kBFloat16)), b = at::randn({8192, 8192}, on_gpu(at::kBFloat16));
  at::Tensor product = at::empty({8192, 8192}, on_gpu(at::kBFloat16));
  at::Tensor from = at::randn({int64_t{1} << 28}, on_gpu(at::kFloat)),
             to = at::empty({int64_t{1} << 28}, on_gpu(at::kBFloat16));
  void operator()() {
    at::mm_out(product, a, b);
    to.copy_(from);
  }
};

/// As in the Python file of the same purpose: products of a training step's shapes, a copy, a sum, a softmax.
struct All {
  Pair pair;
  at::Tensor x = at::randn({8192, 2048}, on_gpu(at::kBFloat16)), qkv = at::randn({2048, 6144}, on_gpu(at::kBFloat16));
  at::Tensor up = at::randn({2048, 8192}, on_gpu(at::kBFloat16)),
             head = at::randn({2048, 32000}, on_gpu(at::kBFloat16));
  at::Tensor logits = at::randn({8192, 8192}, on_gpu(at::kFloat));
  void operator()() {
    pair();
    static_cast<void>(at::mm(x, qkv));
    static_cast<void>(at::mm(x, up));
    static_cast<void>(at::mm(x, head));
    static_cast<void>(at::add(logits, logits));
    static_cast<void>(at::softmax(logits, 1));
    pause();
  }
  /// Without it the power limit sets the clock, and with it the times, by what ran in the second before.
  static void pause() {
    c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
};

void write(const std::string& path, const Json& json) {
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  if (!file) throw std::runtime_error("can't write " + path);
}

template <class Work>
void repeat(Work& work, int calls) {
  for (int i = 0; i < calls; ++i) work();
}

Trace traced(const std::function<void()>& work) {
  Options options;
  options.record_shapes = options.with_flops = true;
  Profiler profiler(options);
  profiler.start();
  work();
  profiler.stop();
  for (const std::string& error : profiler.trace().audit.errors) std::cerr << "audit: " << error << "\n";
  return profiler.trace();
}

void times(const std::string& path, int calls) {
  All all;
  repeat(all, kWarmUps);
  std::map<std::string, std::vector<int64_t>> kernels;
  const Trace trace = traced([&] { repeat(all, calls); });
  for (const Kernel& k : trace.kernels) kernels[k.name].push_back(k.end_ns - k.start_ns);
  write(path, {{"tool", "fsdpp"}, {"calls", calls}, {"kernels", kernels}});
  if (!trace.audit.errors.empty()) throw std::runtime_error("the trace has errors");
}

Json json_of(const KernelLight& k, const Counters& counters) {
  const auto value = [](const std::optional<double>& v) { return v ? Json(*v) : Json(nullptr); };
  const Verdict verdict = judge(k);
  Json raw = Json::array();
  if (const auto it = counters.by_kernel.find(k.name); it != counters.by_kernel.end()) raw = it->second;
  return {{"compute", value(k.compute_percent)},
          {"memory", value(k.memory_percent)},
          {"l2", value(k.l2_percent)},
          {"l1", value(k.l1_percent)},
          {"flops", value(k.flops)},
          {"bytes", value(k.bytes)},
          {"us", k.total_ns / 1e3 / static_cast<double>(k.count)},
          {"bound", to_string(verdict.bound)},
          {"fix", verdict.fix},
          {"source", to_string(k.source)},
          {"raw", std::move(raw)}};
}

void judge_all(const std::string& path, const Trace& trace, const Counters& counters) {
  const Ceilings roofs = measure_ceilings(0);
  Json kernels = Json::object();
  for (const KernelLight& k : speed_of_light(trace, analyse(trace), roofs, counters))
    kernels[k.name] = json_of(k, counters);
  const std::string source = choose_source(counters.rungs).text;
  write(path, {{"source", source},
               {"notes", counters.notes},
               {"ceilings",
                {{"tflops", roofs.flops_per_s / 1e12}, {"gbytes", roofs.bytes_per_s / 1e9}, {"origin", roofs.origin}}},
               {"kernels", kernels}});
  std::cout << source << "\n"
            << report_text(report_json(std::span(&trace, 1), {.ceilings = roofs, .counters = {counters}}));
}

void counters(const std::string& path) {
  Pair pair;
  repeat(pair, kWarmUps);
  const Trace trace = traced([&] { repeat(pair, 5); });
  StepCounters counting(cupti_counter_device(0), trace, {});
  while (!counting.done()) {
    counting.begin_step();
    repeat(pair, 5);
    counting.end_step();
  }
  judge_all(path, trace, counting.take());
}

void samples(const std::string& path) {
  Pair pair;
  repeat(pair, kWarmUps);
  const auto sampler = open_pm_sampler(0);
  std::vector<CounterSample> all;
  const Trace trace = traced([&] {
    sampler->start();
    repeat(pair, 20);
    static_cast<void>(pair.to[0].item<float>());
    all = sampler->stop();
  });
  if (!all.empty())
    std::cout << all.size() << " samples of " << (all[0].end_ns - all[0].start_ns) << " ns, from "
              << all.front().start_ns - trace.start_ns << " to " << all.back().end_ns - trace.start_ns
              << " ns after the start of a window of " << trace.end_ns - trace.start_ns << " ns"
              << (sampler->overflowed() ? ", and the buffer overflowed" : "") << "\n";
  judge_all(path, trace, counters_of_samples(trace, all, {{Source::Sampled, true, ""}}));
}

int run(const std::vector<std::string>& args) {
  const std::string mode = args.empty() ? "" : args[0];
  const auto calls = [&](size_t i, int fallback) { return args.size() > i ? std::atoi(args[i].c_str()) : fallback; };
  if (!at::hasCUDA()) throw std::runtime_error("this program needs a GPU");
  if (mode == "run") {
    Pair pair;
    repeat(pair, calls(1, 5));
    return 0;
  }
  if (args.size() < 2)
    throw std::runtime_error("usage: profiler_kernels run [calls] | times FILE [calls] | counters FILE | samples FILE");
  if (mode == "times") times(args[1], calls(2, 60));
  if (mode == "counters") counters(args[1]);
  if (mode == "samples") samples(args[1]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::cerr << "profiler_kernels: " << e.what() << "\n";
    return 1;
  }
}

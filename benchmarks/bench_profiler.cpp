// What the profiler costs: a training step with the profiler off, waiting, recording the base set, and recording everything,
// interleaved so that drift hits all alike. One JSON line: the median step of each in microseconds and its cost against "off".
//   bench_profiler [cpu|cuda] [width] [layers] [rounds]
#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "fsdpp/profiler/profiler.h"

namespace {

using fsdpp::profiler::Options;
using fsdpp::profiler::Profiler;
using Clock = std::chrono::steady_clock;

constexpr int kSteps = 10;  // of one measurement

struct Work {
  torch::nn::Sequential model;
  at::Tensor input;

  Work(c10::Device device, int64_t width, int64_t layers) : input(at::rand({width, width}, device)) {
    for (int64_t i = 0; i < layers; ++i) {
      model->push_back(torch::nn::Linear(width, width));
      model->push_back(torch::nn::ReLU());
    }
    model->to(device);
  }
  /// Ends when the device is done: the loss is read.
  double step() {
    model->zero_grad();
    const at::Tensor loss = model->forward(input).sum();
    loss.backward();
    return loss.item<double>();
  }
  double step_us() {
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) step();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kSteps;
  }
};

struct Mode {
  const char* name;
  bool profiled, waiting, all;
  std::vector<double> us;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void measure(Work& work, Mode& mode) {
  if (!mode.profiled) return mode.us.push_back(work.step_us());
  Options options;
  options.record_shapes = options.with_flops = options.profile_memory = mode.all;
  if (mode.waiting) options.schedule = Options::by({.wait = 1'000'000});
  Profiler profiler(options);
  profiler.start();
  work.step();  // code that is loaded at the first launch of a window
  mode.us.push_back(work.step_us());
  profiler.stop();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const bool cuda = args.empty() ? at::hasCUDA() : args[0] == "cuda";
  const auto number = [&](size_t i, int64_t fallback) { return args.size() > i ? std::atoll(args[i].c_str()) : fallback; };
  Work work(cuda ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU), number(1, cuda ? 4096 : 256), number(2, 16));
  std::array modes{Mode{"off", false, false, false, {}}, Mode{"waiting", true, true, false, {}}, Mode{"base", true, false, false, {}},
                   Mode{"all", true, false, true, {}}};
  for (int i = 0; i < 5; ++i) work.step();
  for (int64_t round = number(3, 20); round > 0; --round)
    for (Mode& mode : modes) measure(work, mode);
  const double off = median(modes[0].us);
  std::cout << "{\"benchmark\": \"profiler\", \"device\": \"" << (cuda ? "cuda" : "cpu") << "\"";
  for (const Mode& mode : modes)
    std::cout << ", \"" << mode.name << "_us\": " << median(mode.us) << ", \"" << mode.name << "_cost\": " << median(mode.us) / off - 1;
  std::cout << "}" << std::endl;
}

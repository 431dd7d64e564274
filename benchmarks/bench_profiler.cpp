// What the profiler costs: a training step with the profiler off, waiting, recording the base set, and recording
// everything, interleaved so that drift hits all alike. One JSON line: the median step of each in microseconds and its
// cost against "off"; "detached" is the step before this process first met CUPTI.
//   bench_profiler [cpu|cuda] [mlp|minillm] [rounds] [width of mlp] [layers]
// minillm is the example's training step, sharded over one rank, with its own sizes on a GPU and tiny ones on the CPU.
#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/optim/adamw.h"
#include "fsdpp/profiler/profiler.h"
#include "trainer.h"

namespace {

using fsdpp::profiler::Options;
using fsdpp::profiler::Profiler;
using Clock = std::chrono::steady_clock;

constexpr int kSteps = 5;  // of one measurement
constexpr int kWarmUps = 15;

/// A step ends when the device is done: the loss is read.
using Step = std::function<void()>;

Step mlp_step(c10::Device device, int64_t width, int64_t layers) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::ReLU());
  }
  model->to(device);
  return [model, input = at::rand({width, width}, device)]() mutable {
    model->zero_grad();
    const at::Tensor loss = model->forward(input).sum();
    loss.backward();
    static_cast<void>(loss.item<double>());
  };
}

struct Training {
  minillm::Options options;
  minillm::Place place;
  minillm::MiniLLM model;
  fsdpp::optim::AdamW optimizer;
  at::Tensor tokens;

  explicit Training(const minillm::Options& o)
      : options(o),
        place(minillm::find_place(options)),
        model(minillm::build_model(options, place)),
        optimizer(*model, {}),
        tokens(at::randint(options.model.vocab, {options.batch, options.seq},
                           at::TensorOptions().dtype(at::kLong).device(place.device))) {}
  void step() {
    optimizer.zero_grad();
    const at::Tensor loss = minillm::mean_loss(model(tokens), tokens);
    loss.backward();
    optimizer.step();
    static_cast<void>(loss.item<double>());
  }
};

Step minillm_step(bool cuda, int64_t layers) {
  minillm::Options o;
  o.cuda = cuda;
  o.precision = cuda ? minillm::Precision::BF16 : minillm::Precision::FP32;
  o.model.layers = layers;
  if (!cuda) o.model.vocab = 512, o.model.dim = 128, o.model.heads = 4, o.seq = 64, o.batch = 4;
  return [training = std::make_shared<Training>(o)] { training->step(); };
}

double step_us(const Step& step) {
  const auto start = Clock::now();
  for (int i = 0; i < kSteps; ++i) step();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kSteps;
}

struct Mode {
  const char* name;
  bool profiled, waiting, all;
  std::vector<double> us, cost;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Each mode is measured with the GPU as warm as after any other: a pause, such as the writing of a trace, lets it run faster for a while.
// The first step of a window also loads code.
void measure(const Step& step, Mode& mode) {
  const auto steady_us = [&] {
    for (int i = 0; i < kWarmUps; ++i) step();
    return step_us(step);
  };
  if (!mode.profiled) return mode.us.push_back(steady_us());
  Options options;
  options.record_shapes = options.with_flops = options.profile_memory = mode.all;
  if (mode.waiting) options.schedule = Options::by({.wait = 1'000'000});
  Profiler profiler(options);
  profiler.start();
  mode.us.push_back(steady_us());
  profiler.stop();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const bool cuda = args.empty() ? at::hasCUDA() : args[0] == "cuda";
  const std::string workload = args.size() > 1 ? args[1] : "minillm";
  const auto number = [&](size_t i, int64_t fallback) {
    return args.size() > i ? std::atoll(args[i].c_str()) : fallback;
  };
  const c10::Device device = cuda ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU);
  const Step step = workload == "mlp" ? mlp_step(device, number(3, cuda ? 2048 : 256), number(4, 16))
                                      : minillm_step(cuda, number(4, cuda ? 12 : 2));
  std::array modes{Mode{"off", false, false, false, {}, {}}, Mode{"waiting", true, true, false, {}, {}},
                   Mode{"base", true, false, false, {}, {}}, Mode{"all", true, false, true, {}, {}}};
  for (int i = 0; i < 5; ++i) step();
  Mode detached{"detached", false, false, false, {}, {}};
  for (int i = 0; i < 3; ++i) measure(step, detached);
  for (int64_t round = number(2, 10); round > 0; --round) {
    for (size_t i = 0; i < modes.size(); ++i) measure(step, modes[round % 2 != 0 ? i : modes.size() - 1 - i]);
    for (Mode& mode : modes) mode.cost.push_back(mode.us.back() / modes[0].us.back() - 1);
  }
  std::cout << "{\"benchmark\": \"profiler\", \"device\": \"" << (cuda ? "cuda" : "cpu") << "\", \"workload\": \""
            << workload << "\", \"detached_us\": " << median(detached.us);
  for (const Mode& mode : modes)
    std::cout << ", \"" << mode.name << "_us\": " << median(mode.us) << ", \"" << mode.name
              << "_cost\": " << median(mode.cost);
  std::cout << "}" << std::endl;
}

// Host cost of the engine: microseconds of the calling thread per unit and step, by scope, in real training steps of a model of
// many small blocks. One JSON object a row. Before timing, one step's gradients are compared with those of the same model
// unsharded.
//
// Formula: us_per_unit = (host time inside the scope, summed over the timed steps) / (steps · units). Scopes nest: PreForward
// contains Unshard, PostBackward contains Reduce and Reshard.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/fsdpp.h"
#include "fsdpp/trace/scope.h"

namespace {

using Clock = std::chrono::steady_clock;
using fsdpp::trace::Kind;

double us(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::silu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
FSDPP_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int count) {
    for (int i = 0; i < count; ++i) blocks.push_back(register_module(std::to_string(i), Block(dim)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& b : blocks) x = b(x);
    return x;
  }
  std::vector<Block> blocks;
};
FSDPP_MODULE(Net);

class HostTimes final : public fsdpp::trace::Listener {
 public:
  void begin(const fsdpp::trace::Event&) noexcept override { starts_.push_back(Clock::now()); }
  void end(const fsdpp::trace::Event& e) noexcept override {
    auto& total = totals_[static_cast<size_t>(e.kind)];
    total.us += us(Clock::now() - starts_.back());
    ++total.calls;
    starts_.pop_back();
  }
  struct Total {
    double us = 0;
    int64_t calls = 0;
  };
  const Total& of(Kind kind) const { return totals_[static_cast<size_t>(kind)]; }

 private:
  std::vector<Clock::time_point> starts_;
  std::array<Total, 16> totals_{};
};

struct Settings {
  bool cuda = false;
  int64_t dim = 64, layers = 24, steps = 30, warmup = 5;
};

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc) throw fsdpp::ConfigError("bench_host: expected a value after " + flag);
    const std::string value = argv[i + 1];
    if (flag == "--device" && value != "cpu" && value != "cuda")
      throw fsdpp::ConfigError("bench_host: --device: expected cpu or cuda, got " + value);
    if (flag == "--device") s.cuda = value == "cuda";
    else if (flag == "--dim") s.dim = std::stoll(value);
    else if (flag == "--layers") s.layers = std::stoll(value);
    else if (flag == "--steps") s.steps = std::stoll(value);
    else throw fsdpp::ConfigError("bench_host: unknown flag " + flag + ". Flags: --device cpu|cuda --dim N --layers N --steps N");
  }
  return s;
}

double step_ms(const std::vector<double>& all) {
  auto sorted = all;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

// One step of both on the same samples; the models hold the same weights.
void check_gradients(const Settings& s, c10::Device device, Net& net, Net& plain) {
  const auto x = at::randn({4, s.dim}, device);
  net(x).square().mean().backward();
  plain(x).square().mean().backward();
  const auto sharded = net->parameters(), expected = plain->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto got = fsdpp::shard::full_tensor(fsdpp::sharding_of(sharded[i]), sharded[i].grad());
    if (!at::allclose(got, expected[i].grad(), 1e-3, 1e-5))
      throw fsdpp::Error("bench_host: gradient " + std::to_string(i) + " differs from that of the unsharded model");
  }
}

// Median wall time of a step of `net` (called by `forward`).
template <class Forward>
double time_steps(const Settings& s, c10::Device device, torch::nn::Module& net, Forward forward, fsdpp::trace::Listener* listener) {
  std::vector<double> times;
  auto x = at::randn({4, s.dim}, device);
  for (int64_t i = 0; i < s.warmup + s.steps; ++i) {
    for (auto& p : net.parameters()) p.mutable_grad() = at::Tensor();
    fsdpp::cuda::current_stream(device).synchronize();
    if (i == s.warmup) fsdpp::trace::set_listener(listener);
    auto start = Clock::now();
    forward(x).square().mean().backward();
    fsdpp::cuda::current_stream(device).synchronize();
    if (i >= s.warmup) times.push_back(us(Clock::now() - start) / 1e3);
  }
  fsdpp::trace::set_listener(nullptr);
  return step_ms(times);
}

void print_rows(const Settings& s, fsdpp::comm::World& world, const HostTimes& times, double sharded_ms, double plain_ms) {
  nlohmann::json base{{"bench", "host"}, {"device", s.cuda ? "cuda" : "cpu"}, {"world", world.size()}, {"units", s.layers + 1},
                      {"dim", s.dim}, {"parameters_per_unit", 4}, {"formula", "host us in scope / (steps * units)"},
                      {"machine", {{"cpu_threads", std::thread::hardware_concurrency()},
                                   {"torch", TORCH_VERSION},
                                   {"compiler", __VERSION__}}}};
  auto per_unit = [&](Kind k) { return times.of(k).us / static_cast<double>(s.steps * (s.layers + 1)); };
  for (auto [kind, name] : {std::pair{Kind::Unshard, "unshard"}, {Kind::Reshard, "reshard"}, {Kind::Reduce, "reduce"},
                            {Kind::PreForward, "pre_forward"}, {Kind::PostForward, "post_forward"}, {Kind::PreBackward, "pre_backward"},
                            {Kind::PostBackward, "post_backward"}}) {
    auto row = base;
    row["scope"] = name;
    row["us_per_unit"] = per_unit(kind);
    row["calls_per_step"] = static_cast<double>(times.of(kind).calls) / static_cast<double>(s.steps);
    std::cout << row.dump() << "\n";
  }
  auto row = base;
  row["scope"] = "unshard + reshard + reduce";
  row["us_per_unit"] = per_unit(Kind::Unshard) + per_unit(Kind::Reshard) + per_unit(Kind::Reduce);
  row["step_ms"] = sharded_ms;
  row["plain_step_ms"] = plain_ms;
  row["ratio_to_plain"] = sharded_ms / plain_ms;
  std::cout << row.dump() << std::endl;
}

void run(const Settings& s) {
  fsdpp::comm::WorldOptions options;
  options.device = s.cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  auto world = fsdpp::comm::World::init(options);
  auto device = world->device();
  at::manual_seed(1);
  Net plain(s.dim, static_cast<int>(s.layers));
  plain->to(device);
  auto plain_ms = time_steps(s, device, *plain, [&](auto& x) { return plain(x); }, nullptr);
  plain->zero_grad();
  at::manual_seed(1);
  Net net(s.dim, static_cast<int>(s.layers));
  net->to(device);
  auto mesh = fsdpp::comm::Mesh::shard(world);
  for (auto& b : net->blocks) fsdpp::fully_shard(b, mesh);
  fsdpp::fully_shard(net, mesh);
  check_gradients(s, device, net, plain);
  HostTimes times;
  auto sharded_ms = time_steps(s, device, *net, [&](auto& x) { return net(x); }, &times);
  if (times.of(Kind::Reduce).calls != s.steps * s.layers) throw fsdpp::Error("bench_host: expected one reduction for each block and step");
  if (world->rank() == 0) print_rows(s, *world, times, sharded_ms, plain_ms);
}

}  // namespace

int main(int argc, char** argv) try {
  run(parse(argc, argv));
} catch (const std::exception& e) {
  fsdpp::comm::report_failure(e.what());
  std::cerr << e.what() << "\n";
  return 1;
}

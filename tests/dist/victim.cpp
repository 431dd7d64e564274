// One rank of a small training loop that may go wrong on purpose, for tests of what the other ranks and the launcher then do.
//   victim [--how=none|kill|exit|throw|terminate|hang] [--rank=2] [--at=3] [--steps=5] [--value=1] [--folder=DIR]
// Rank `rank` goes wrong in step `at`, between forward and backward. With a folder, every step ends with a full state in it. Prints
// "pid P port Q", "step S" after each step, and in the end "result V", V = value - 0.1 · steps · mean over the ranks of r + 1.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <thread>

#include "fsdpp/api/fully_shard.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/rank_env.h"
#include "fsdpp/checkpoint/full_state.h"

namespace {

namespace full_state = fsdpp::dcp;
using Flags = std::map<std::string, std::string>;

struct SumImpl : torch::nn::Module {
  explicit SumImpl(double value) { w = register_parameter("w", at::full({8}, value)); }
  at::Tensor forward() { return w.sum(); }
  at::Tensor w;
};
FSDPP_MODULE(Sum);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double value) {
    first = register_module("first", Sum(value));
    second = register_module("second", Sum(value));
  }
  at::Tensor forward() { return first() + second(); }
  Sum first{nullptr}, second{nullptr};
};
FSDPP_MODULE(Net);

Flags parse(int argc, char** argv) {
  Flags flags{{"how", "none"}, {"rank", "2"}, {"at", "3"}, {"steps", "5"}, {"value", "1"}, {"folder", ""}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto cut = text.find('=');
    if (!text.starts_with("--") || cut == std::string::npos || !flags.contains(text.substr(2, cut - 2)))
      throw fsdpp::ConfigError("victim: unknown argument '" + text + "'");
    flags[text.substr(2, cut - 2)] = text.substr(cut + 1);
  }
  return flags;
}

void go_wrong(const std::string& how) {
  if (how == "kill") std::raise(SIGKILL);
  if (how == "exit") std::exit(13);
  if (how == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
  if (how == "throw") throw std::runtime_error("the victim's own error");
  if (how == "terminate") std::thread([] { throw std::runtime_error("the victim's uncaught error"); }).join();
}

void train(Flags& flags) {
  auto world = fsdpp::comm::World::init();
  std::printf("pid %d port %d\n", ::getpid(), fsdpp::detect_rank_env().master_port);
  std::fflush(stdout);
  Net net(std::stod(flags["value"]));
  auto mesh = fsdpp::comm::Mesh::shard(world);
  for (auto& layer : {net->first, net->second}) fsdpp::fully_shard(layer, mesh);
  fsdpp::fully_shard(net, mesh);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 1; step <= std::stoi(flags["steps"]); ++step) {
    sgd.zero_grad();
    auto loss = net() * (world->rank() + 1);
    if (world->rank() == std::stoi(flags["rank"]) && step == std::stoi(flags["at"])) go_wrong(flags["how"]);
    loss.backward();
    sgd.step();
    if (!flags["folder"].empty()) full_state::save_full(*net, flags["folder"] + "/step" + std::to_string(step));
    std::printf("step %d\n", step);
    std::fflush(stdout);
  }
  std::printf("result %.4f\n", fsdpp::full_tensor(net->second->w)[7].item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto flags = parse(argc, argv);
    train(flags);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    fsdpp::comm::report_failure(error.what());
    return 1;
  }
}

#pragma once
/// What the tests named after PyTorch's FSDP2 suite share (docs/fsdp2_tests.md says which test stands for which).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdpp/fsdpp.h"
#include "support/event_log.h"
#include "support/slow_world.h"
#include "support/tiny_models.h"

namespace fsdpp::test::suite {

using comm::Mesh;
using comm::World;
using Reshard = std::optional<ReshardAfterForward>;
using Rank = std::shared_ptr<SlowWorld>;

/// Runs `body` on `size` ranks, each a thread whose communicators sleep as world->delays says.
inline void each_rank(int size, const std::function<void(Rank)>& body) {
  comm::run_local_world(size, [&](std::shared_ptr<World> world) { body(std::make_shared<SlowWorld>(std::move(world))); });
}

/// up, relu, down, relu.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t dim, int64_t hidden = 0, int64_t out = 0) {
    in_proj = register_module("in_proj", torch::nn::Linear(dim, hidden ? hidden : 4 * dim));
    out_proj = register_module("out_proj", torch::nn::Linear(hidden ? hidden : 4 * dim, out ? out : dim));
  }
  at::Tensor forward(const at::Tensor& x) { return out_proj(at::relu(in_proj(x))).relu(); }
  Hooked<torch::nn::Linear> in_proj{nullptr}, out_proj{nullptr};
};
FSDPP_MODULE(Mlp);

/// Mlps one after the other: names "0", "1", ….
struct MlpStackImpl : torch::nn::Module {
  MlpStackImpl(int64_t dim, int count) {
    for (int i = 0; i < count; ++i) mlps.push_back(register_module(std::to_string(i), Mlp(dim)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& m : mlps) x = m(x);
    return x;
  }
  std::vector<Mlp> mlps;
};
FSDPP_MODULE(MlpStack);

/// The same weights on every rank and for every model of one shape, on the rank's device.
template <class Holder>
Holder filled(Holder module, const World& world, uint64_t seed = 1) {
  fill_parameters(*module, seed);
  module->to(world.device());
  return module;
}

template <class Holder>
Holder filled_float64(Holder module, const World& world) {
  filled(module, world)->to(at::kDouble);
  return module;
}

/// Random numbers that depend on nothing but shape and seed.
inline at::Tensor random_input(const World& world, at::IntArrayRef sizes, uint64_t seed, c10::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat)).to(world.device(), dtype);
}

/// Collectives that one rank put on the wire.
struct WireCounts {
  int64_t all_gathers = 0, reduce_scatters = 0, all_reduces = 0;
  bool operator==(const WireCounts&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const WireCounts& c) {
  return out << c.all_gathers << " all-gathers, " << c.reduce_scatters << " reduce-scatters, " << c.all_reduces << " all-reduces";
}
/// REQUIRES: events of a log that hears collectives.
inline WireCounts wire_counts(const std::vector<std::string>& events) {
  return {count_events(events, "all_gather"), count_events(events, "reduce_scatter"), count_events(events, "all_reduce")};
}

/// Adds up the counts of all units at or below `module`.
inline UnitStats total_stats(const torch::nn::Module& module) {
  UnitStats sum;
  for (auto& u : units(module)) {
    auto s = u.stats();
    sum.gathers += s.gathers, sum.forward_gathers += s.forward_gathers, sum.backward_gathers += s.backward_gathers;
    sum.reduces += s.reduces, sum.all_reduces += s.all_reduces, sum.reshards += s.reshards;
  }
  return sum;
}

/// The global gradient of a sharded parameter. Collective.
inline at::Tensor full_grad(const at::Tensor& parameter) { return shard::full_tensor(sharding_of(parameter), parameter.grad()); }

inline void expect_sharded(const torch::nn::Module& module) {
  for (auto& u : units(module)) EXPECT_TRUE(u.is_sharded()) << "unit '" << u.name() << "'";
}

/// Handles show local shards, whose shapes the metadata tells.
inline void expect_handles_show_shards(const torch::nn::Module& module) {
  for (auto& p : sharded_parameters(module)) EXPECT_EQ(p.handle.sizes().vec(), p.local_sizes()) << p.name;
}

/// Parameters of `sharded` are those of `plain`, and so are, if asked for, their gradients. Tolerances are relative. Collective.
inline void expect_same_parameters(const torch::nn::Module& sharded, const torch::nn::Module& plain, double tolerance = 1e-6,
                                   std::optional<double> gradient_tolerance = std::nullopt) {
  auto got = sharded.parameters(), want = plain.parameters();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_LE(relative_error(full_tensor(got[i]), want[i].detach()), tolerance) << "parameter " << i;
    if (!gradient_tolerance) continue;
    ASSERT_EQ(got[i].grad().defined(), want[i].grad().defined()) << "gradient " << i;
    if (!want[i].grad().defined()) continue;
    EXPECT_LE(relative_error(full_grad(got[i]), want[i].grad()), *gradient_tolerance) << "gradient " << i;
  }
}

/// One model in a comparison: its module, and the loss that one rank's input gives in one iteration.
struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& input, int iteration)> loss;
};
template <class Holder>
Trainee trainee(Holder holder) {
  return {holder.ptr(), [holder](const at::Tensor& x, int) mutable { return holder(x).sum(); }};
}

/// How a comparison trains. Delays are milliseconds on the compute stream; those of collectives are the world's.
struct ParityOptions {
  int iterations = 10;
  double lr = 1e-2;
  /// Relative, of losses and parameters; gradients may be off by five times as much, as sums whose parts cancel. Unset: 1e-6, on
  /// GPUs 1e-5, where kernels add in another order for another shape.
  std::optional<double> tolerance = std::nullopt;
  double delay_after_forward = 0, delay_before_optim = 0;
  bool sharded_after_step = true;  ///< expects every unit to be sharded after the optimizer's step
  bool unshard_async = false;      ///< every unit is asked for ahead of each forward
  int micro_batches = 1;           ///< backwards in one iteration, whose gradients add up
  std::function<void(int micro_batch)> before_micro_batch = [](int) {};
  std::function<void()> after_backwards = [] {};
  std::function<void()> after_step = [] {};
};

/// For models in float64, where rounding can't hide a gradient that went missing in one of many backwards.
inline ParityOptions float64_parity() {
  ParityOptions options;
  options.tolerance = 1e-12;
  return options;
}

/// Input of one rank in one micro-batch (counted on over the iterations).
using Inputs = std::function<at::Tensor(int micro_batch, int rank)>;
inline Inputs random_inputs(const Rank& world, std::vector<int64_t> sizes, c10::ScalarType dtype = at::kFloat) {
  return [world, sizes, dtype](int micro_batch, int rank) {
    return random_input(*world, sizes, static_cast<uint64_t>(100 * micro_batch + rank), dtype);
  };
}

/// Trains `sharded` on this rank's inputs and `plain` on those of all ranks, both by Adam (eps 1e-3), the gradients dropped and
/// zeroed in turn. Expects the same loss on this rank's input in each iteration, and the same parameters and gradients at the end.
/// Collective.
void expect_train_parity(SlowWorld& world, const Trainee& sharded, const Trainee& plain, const Inputs& inputs,
                         const ParityOptions& options = {});

}  // namespace fsdpp::test::suite

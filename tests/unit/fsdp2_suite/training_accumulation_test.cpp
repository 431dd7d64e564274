// test_fully_shard_training.py: gradients added up over micro-batches, with exact counts of collectives.
#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

constexpr int kMlps = 3, kMicro = 3;
constexpr int64_t kDim = 8;

/// The root unit gets a layer of its own.
struct AccumulatorImpl : torch::nn::Module {
  AccumulatorImpl() {
    first = register_module("first", torch::nn::Linear(kDim, kDim));
    for (int i = 0; i < kMlps; ++i) mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(kDim)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = first(x);
    for (auto& m : mlps) y = m(y);
    return y;
  }
  torch::nn::Linear first{nullptr};
  std::vector<Mlp> mlps;
};
FSDPP_MODULE(Accumulator);

/// Which units keep their gradients until the last micro-batch.
enum class Keeps { All, RootOnly, SomeMlps };
constexpr int kKeepingMlps = 2;  // of Keeps::SomeMlps

struct Case {
  int replicas = 1;
  ReshardAfterForward reshard = true;
  Keeps keeps = Keeps::All;
  bool reshard_after_backward = true;
  bool reduce_scatter_only = false;  ///< keep the all-reduce only
  [[nodiscard]] bool keeps_gathered() const { return reshard == ReshardAfterForward(false); }
  /// Not resharding after backward means something only if forward does not reshard either.
  [[nodiscard]] bool makes_sense() const {
    return (reshard_after_backward || (keeps_gathered() && keeps != Keeps::SomeMlps)) && (replicas > 1 || !reduce_scatter_only);
  }
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.replicas << " replicas, group " << c.reshard.group() << ", keeps " << static_cast<int>(c.keeps)
             << ", reshard after backward " << c.reshard_after_backward << ", reduce-scatter only " << c.reduce_scatter_only;
}

WireCounts expected_counts(const Case& c) {
  constexpr int kUnits = kMlps + 1;
  int early = c.keeps == Keeps::All ? 0 : c.keeps == Keeps::RootOnly ? kMlps : kUnits - kKeepingMlps;  // units that do not keep
  WireCounts counts;
  counts.reduce_scatters = kUnits + early * (kMicro - 1);
  counts.all_reduces = c.replicas > 1 ? counts.reduce_scatters : 0;
  if (c.reduce_scatter_only) counts.reduce_scatters = kUnits * kMicro;
  if (!c.keeps_gathered())
    counts.all_gathers = 2 * kUnits * kMicro;
  else if (c.reshard_after_backward)
    counts.all_gathers = kUnits * kMicro;
  else
    counts.all_gathers = kUnits + (c.keeps == Keeps::All ? 0 : kMlps * (kMicro - 1));
  return counts;
}

void set_flags(Accumulator& net, const Case& c, bool last) {
  auto set = [&](const torch::nn::Module& module, bool recurse) {
    auto unit = unit_of(module);
    if (c.reduce_scatter_only)
      unit.set_requires_all_reduce(last, recurse);
    else
      unit.set_requires_gradient_sync(last, recurse);
    if (!c.reshard_after_backward) unit.set_reshard_after_backward(last, recurse);
  };
  if (c.keeps == Keeps::All) set(*net, true);
  if (c.keeps == Keeps::RootOnly) set(*net, false);
  if (c.keeps == Keeps::SomeMlps)
    for (int i = 0; i < kKeepingMlps; ++i) set(*net->mlps[static_cast<size_t>(i)], true);
}

void gradient_accumulation(const Rank& world, const Case& c) {
  auto sharded = filled_float64(Accumulator(), *world), plain = filled_float64(Accumulator(), *world);
  auto mesh = Mesh::hybrid(world, c.replicas);
  FullyShardOptions options{.reshard_after_forward = c.reshard};
  for (auto& m : sharded->mlps) fully_shard(m, mesh, options);
  fully_shard(sharded, mesh, options);
  EventLog log(EventLog::What::Collectives, *world);
  auto parity = float64_parity();
  parity.iterations = 5;
  parity.micro_batches = kMicro;
  parity.before_micro_batch = [&](int k) { set_flags(sharded, c, k == kMicro - 1); };
  parity.after_backwards = [&] { EXPECT_EQ(wire_counts(log.take()), expected_counts(c)) << c; };
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {2, kDim}, at::kDouble), parity);
}

std::vector<Case> cases(int replicas) {
  std::vector<Case> all;
  for (ReshardAfterForward reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)})
    for (auto keeps : {Keeps::All, Keeps::RootOnly, Keeps::SomeMlps})
      for (bool after_backward : {false, true})
        for (bool reduce_scatter_only : {false, true})
          if (Case c{replicas, reshard, keeps, after_backward, reduce_scatter_only}; c.makes_sense()) all.push_back(c);
  return all;
}

class GradientAccumulation : public ::testing::TestWithParam<int> {};  // replicas, of four ranks
TEST_P(GradientAccumulation, CountsOfCollectivesAndGradientsAreExact) {
  for (auto& c : cases(GetParam())) each_rank(4, [&](Rank world) { gradient_accumulation(world, c); });
}
INSTANTIATE_TEST_SUITE_P(Replicas, GradientAccumulation, ::testing::Values(1, 2));

// -- pipelines -----------------------------------------------------------------------------------------------------------

struct Pipeline {
  bool explicit_unshard = false, reshard_after_backward = true;
};

/// 'F' and 'B' of each micro-batch in `schedule` in turn; gradients are reduced at the last backward only.
void microbatching(const Rank& world, const std::string& schedule, const Pipeline& p) {
  auto make = [&] {
    auto net = make_tiny_net(1, 2);
    net->to(world->device());
    return net;
  };
  auto sharded = make(), plain = make();
  FullyShardOptions options{.reshard_after_forward = false};
  shard_tiny_net(sharded, Mesh::shard(world), options, options);
  auto root = unit_of(*sharded);
  EventLog log(EventLog::What::Collectives, *world);
  if (p.explicit_unshard)
    for (auto& u : units(*sharded)) u.unshard(/*async=*/true);
  std::vector<at::Tensor> losses;
  int backwards = 0;
  for (char step : schedule) {
    if (step == 'F') {
      auto ids = tokens(10 * losses.size() + static_cast<size_t>(world->rank())).to(world->device());
      losses.push_back(token_loss(sharded(ids), ids.flip(0)));
      continue;
    }
    bool last = backwards == kMicro - 1;
    root.set_requires_gradient_sync(last);
    root.set_is_last_backward(last);
    if (!p.reshard_after_backward) root.set_reshard_after_backward(last);
    std::exchange(losses[static_cast<size_t>(backwards++)], at::Tensor()).backward();
  }
  auto counts = wire_counts(log.take());
  for (int k = 0; k < kMicro; ++k)
    for (int r = 0; r < world->size(); ++r) {
      auto ids = tokens(static_cast<uint64_t>(10 * k + r)).to(world->device());
      (token_loss(plain(ids), ids.flip(0)) / world->size()).backward();
    }
  expect_same_parameters(*sharded, *plain, 0, 5e-6);
  expect_sharded(*sharded);
  constexpr int kUnits = 3;
  EXPECT_EQ(counts.reduce_scatters, world->size() > 1 ? kUnits : 0);
  int64_t gathers = p.reshard_after_backward ? kUnits * kMicro : kUnits;
  EXPECT_EQ(counts.all_gathers, world->size() > 1 ? gathers : 0) << schedule;
}

class Microbatching : public ::testing::TestWithParam<int> {};
TEST_P(Microbatching, OneForwardOneBackwardAndOtherSchedules) {
  for (std::string schedule : {"FBFBFB", "FFBFBB", "FFFBBB"})
    for (bool explicit_unshard : {false, true})
      for (bool after_backward : {false, true})
        each_rank(GetParam(), [&](Rank world) { microbatching(world, schedule, {explicit_unshard, after_backward}); });
}
INSTANTIATE_TEST_SUITE_P(Ranks, Microbatching, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdpp::test::suite

// test_fully_shard_frozen.py: trainable and frozen parameters in one unit, in different units, in modules that run several times.
#include <torch/optim/adam.h>

#include "unit/fsdp2_suite/support.h"

namespace fsdpp::test::suite {
namespace {

constexpr int64_t kDim = 8;

class FullyShardFrozen : public ::testing::TestWithParam<int> {
 protected:
  static int size() { return GetParam(); }
  static std::vector<Reshard> reshards() {
    std::vector<Reshard> all = {false, true};
    if (size() % 2 == 0) all.push_back(2);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, FullyShardFrozen, ::testing::Values(1, 2, 3, 4));

void train_biases_only(torch::nn::Module& module) {
  for (auto& p : module.named_parameters())
    if (p.key().find("bias") == std::string::npos) p.value().requires_grad_(false);
}

/// Pre- and post-backward of each unit in turn: no post-backward waits for the end of backward.
std::vector<std::string> hooks_in_turn(const std::vector<std::string>& units) {
  std::vector<std::string> events;
  for (auto& u : units)
    for (const char* e : {"+PreBackward ", "+PostBackward "}) events.push_back(e + u);
  return events;
}

std::vector<std::string> backward_hooks(EventLog& log) {
  auto events = log.take_without({"+PreForward", "+PostForward", "+Unshard", "+Reshard", "+Reduce", "-"});
  std::erase_if(events, [](auto& e) { return e == "+PreBackward" || e == "+PostBackward"; });  // the root's
  return events;
}

void mixed_requires_grad_per_group(const Rank& world, Reshard reshard, bool freeze_after) {
  auto sharded = filled_float64(MlpStack(kDim, 3), *world), plain = filled_float64(MlpStack(kDim, 3), *world);
  train_biases_only(*plain);
  if (!freeze_after) train_biases_only(*sharded);
  auto mesh = Mesh::shard(world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  for (auto& m : sharded->mlps) fully_shard(m, mesh, options);
  fully_shard(sharded, mesh, options);
  if (freeze_after) train_biases_only(*sharded);
  std::vector<int64_t> reduced;
  world->watch = [&](const WireCall& call) {
    if (call.op == "reduce_scatter") reduced.push_back(call.count);
  };
  EventLog log(EventLog::What::Hooks);
  auto parity = float64_parity();
  parity.after_backwards = [&] {
    EXPECT_EQ(backward_hooks(log), hooks_in_turn({"2", "1", "0"}));
    for (auto& p : sharded->parameters()) EXPECT_EQ(p.grad().defined(), p.requires_grad());
  };
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {8, kDim}, at::kDouble), parity);
  EXPECT_EQ(reduced.size(), world->size() > 1 ? 30u : 0u);
  if (freeze_after) return;  // then frozen weights stay in the buffer that is reduced
  constexpr int64_t kBiases = 5 * kDim, kWeights = 8 * kDim * kDim;
  int64_t padded = unit_of(*sharded->mlps[0]).memory().gradient_bytes / static_cast<int64_t>(sizeof(double));
  EXPECT_THAT(reduced, ::testing::Each(padded));
  EXPECT_TRUE(kBiases <= padded && padded < kWeights) << padded;
}

TEST_P(FullyShardFrozen, TrainMixedRequiresGradPerGroup) {
  for (auto reshard : reshards())
    for (bool freeze_after : {false, true})
      each_rank(size(), [&](Rank world) { mixed_requires_grad_per_group(world, reshard, freeze_after); });
}

// -- across units --------------------------------------------------------------------------------------------------------

struct LinearsImpl : torch::nn::Module {
  LinearsImpl() {
    for (int i = 0; i < 6; ++i) layers.push_back(register_module("lin" + std::to_string(i), torch::nn::Linear(kDim, kDim)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& l : layers) x = at::relu(l(x));
    return x;
  }
  std::vector<Hooked<torch::nn::Linear>> layers;
};
FSDPP_MODULE(Linears);

void set_even_layers(Linears& net, bool requires_grad) {
  for (size_t i = 0; i < net->layers.size(); i += 2)
    for (auto& p : net->layers[i]->parameters()) p.requires_grad_(requires_grad);
}

// Every other unit frozen; an iteration without gradients in between; the frozen ones thawed for the last iterations.
void mixed_requires_grad_across_groups(const Rank& world, Reshard reshard, bool thaw, bool freeze_after) {
  auto sharded = filled_float64(Linears(), *world), plain = filled_float64(Linears(), *world);
  for (auto* net : {&sharded, &plain})
    if (net == &plain || !freeze_after) set_even_layers(*net, false);
  auto mesh = Mesh::shard(world);
  for (auto& l : sharded->layers) fully_shard(l, mesh, {.reshard_after_forward = reshard});
  fully_shard(sharded, mesh, {.reshard_after_forward = reshard});
  if (freeze_after) set_even_layers(sharded, false);
  auto with_evaluation = [thaw](Linears net) {
    return Trainee{net.ptr(), [net, thaw](const at::Tensor& x, int i) mutable {
                     if (i == 1) {
                       at::NoGradGuard no_grad;
                       (void)net(x);
                     }
                     if (i == 3 && thaw) set_even_layers(net, true);
                     return net(x).sum();
                   }};
  };
  int iteration = 0;
  EventLog log(EventLog::What::Hooks);
  auto parity = float64_parity();
  parity.iterations = 6;
  // A frozen first unit that keeps its parameters is reached by no backward: it stays gathered.
  parity.sharded_after_step = !(reshard == ReshardAfterForward(false));
  parity.after_backwards = [&] {
    bool thawed = thaw && iteration++ >= 3;
    auto events = backward_hooks(log);
    std::erase_if(events, [](auto& e) { return e.starts_with("+Pre"); });
    std::vector<std::string> want;
    for (int l = 5; l >= 0; --l)
      if (thawed || l % 2 == 1) want.push_back("+PostBackward lin" + std::to_string(l));
    EXPECT_EQ(events, want) << "iteration " << iteration;
  };
  auto inputs = random_inputs(world, {8, kDim}, at::kDouble);
  expect_train_parity(*world, with_evaluation(sharded), with_evaluation(plain), inputs, parity);
}

TEST_P(FullyShardFrozen, TrainMixedRequiresGradAcrossGroups) {
  for (auto reshard : reshards())
    for (bool thaw : {false, true})
      for (bool freeze_after : {false, true})
        each_rank(size(), [&](Rank world) { mixed_requires_grad_across_groups(world, reshard, thaw, freeze_after); });
}

// -- modules that run several times --------------------------------------------------------------------------------------

struct MultiForwardImpl : torch::nn::Module {
  MultiForwardImpl() {
    first = register_module("first", torch::nn::Linear(5, 5));
    frozen = register_module("frozen", torch::nn::Linear(5, 5));
    trained = register_module("trained", torch::nn::Linear(5, 5));
    for (auto& p : frozen->parameters()) p.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& input) {
    auto x = first(input);
    for (int i = 0; i < 3; ++i) {
      x = frozen(at::relu(trained(x)));
      at::NoGradGuard no_grad;  // the same unit with and without gradients in one forward
      x += at::relu(trained(x));
    }
    return x;
  }
  Hooked<torch::nn::Linear> first{nullptr}, frozen{nullptr}, trained{nullptr};
};
FSDPP_MODULE(MultiForward);

TEST_P(FullyShardFrozen, MultiForwardMixedRequiresGrad) {
  for (auto reshard : reshards())
    each_rank(size(), [&](Rank world) {
      auto sharded = filled_float64(MultiForward(), *world), plain = filled_float64(MultiForward(), *world);
      auto mesh = Mesh::shard(world);
      FullyShardOptions options{.reshard_after_forward = reshard};
      for (auto* l : {&sharded->first, &sharded->frozen, &sharded->trained}) fully_shard(*l, mesh, options);
      fully_shard(sharded, mesh, options);
      auto trained = unit_of(*sharded->trained), frozen = unit_of(*sharded->frozen);
      expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {8, 5}, at::kDouble), float64_parity());
      EXPECT_EQ(trained.stats().reduces, 10) << "all uses together";
      EXPECT_EQ(frozen.stats().reduces, 0);
    });
}

}  // namespace
}  // namespace fsdpp::test::suite

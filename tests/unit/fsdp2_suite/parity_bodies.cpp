#include "unit/fsdp2_suite/parity_bodies.h"

#include <torch/nn/modules/normalization.h>

#include <map>

namespace fsdpp::test::suite {
namespace {

constexpr double kDelay = 0.5;  // milliseconds: longer than any of these steps' kernels

/// Sleeps for as long as it lives where `delay` says.
struct DelayedWorld {
  DelayedWorld(SlowWorld& w, Delay delay) : world(w) {
    bool all = delay == Delay::Everywhere;
    if (all || delay == Delay::BeforeGather) world.delays.gather = kDelay;
    if (all || delay == Delay::BeforeReduce) world.delays.reduce = kDelay;
  }
  ~DelayedWorld() { world.delays = {}; }
  SlowWorld& world;
};

ParityOptions with_delay(Delay delay) {
  ParityOptions options;
  bool all = delay == Delay::Everywhere;
  if (all || delay == Delay::AfterForward) options.delay_after_forward = kDelay;
  if (all || delay == Delay::BeforeOptim) options.delay_before_optim = kDelay;
  return options;
}

Trainee token_trainee(TinyNet net) {
  return {net.ptr(), [net](const at::Tensor& ids, int) mutable { return token_loss(net(ids), ids.flip(0)); }};
}
Inputs token_inputs(const World& world) {
  return [device = world.device()](int iteration, int rank) { return tokens(100 * iteration + rank).to(device); };
}
TinyNet tiny_net(const World& world, int blocks = 3) {
  auto net = make_tiny_net(1, blocks);
  net->to(world.device());
  return net;
}

}  // namespace

std::shared_ptr<Mesh> mesh_of(const Rank& world, int replicas) {
  if (world->launcher() == "threads") return Mesh::hybrid(world, replicas);
  static auto* meshes = new std::map<int, std::shared_ptr<Mesh>>;
  auto& mesh = (*meshes)[replicas];
  if (!mesh) mesh = Mesh::hybrid(world, replicas, "parity" + std::to_string(replicas));
  return mesh;
}

std::vector<Reshard> reshard_choices(int size) {
  std::vector<Reshard> choices = {std::nullopt, true, false};
  if (size % 2 == 0) choices.push_back(2);
  return choices;
}

void train_parity_single_group(const Rank& world, std::array<int64_t, 3> dims, Reshard reshard) {
  auto make = [&] { return filled(Mlp(dims[0], dims[1], dims[2]), *world); };
  auto sharded = make(), plain = make();
  fully_shard(sharded, mesh_of(world), {.reshard_after_forward = reshard});
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {4, dims[0]}));
}

void train_parity_multi_group(const Rank& world, Reshard reshard, Delay delay, bool unshard_async) {
  DelayedWorld delayed(*world, delay);
  auto sharded = tiny_net(*world), plain = tiny_net(*world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  shard_tiny_net(sharded, mesh_of(world), options, options);
  auto parity = with_delay(delay);
  parity.unshard_async = unshard_async;
  expect_train_parity(*world, token_trainee(sharded), token_trainee(plain), token_inputs(*world), parity);
}

// Through the root, then through one of its units alone: that one has to order the streams and end the backward by itself.
void non_root_forward_backward(const Rank& world) {
  auto sharded = filled(MlpStack(8, 3), *world), plain = filled(MlpStack(8, 3), *world);
  auto mesh = mesh_of(world);
  for (auto& m : sharded->mlps) fully_shard(m, mesh);
  fully_shard(sharded, mesh);
  auto alternating = [](MlpStack net) {
    return Trainee{net.ptr(), [net](const at::Tensor& x, int i) mutable { return i % 2 ? net->mlps[0](x).sum() : net(x).sum(); }};
  };
  ParityOptions options;
  options.delay_before_optim = kDelay;
  expect_train_parity(*world, alternating(sharded), alternating(plain), random_inputs(world, {4, 8}), options);
}

namespace {

struct MultiForwardImpl : torch::nn::Module {
  MultiForwardImpl() {
    inner = register_module("inner", torch::nn::Linear(4, 4));
    outer = register_module("outer", torch::nn::Linear(4, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return outer(inner(x) + inner(x * 2)); }
  Hooked<torch::nn::Linear> inner{nullptr}, outer{nullptr};
};
FSDPP_MODULE(MultiForward);

// An output layer with another module's weight.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(at::Tensor shared) { weight = register_parameter("weight", std::move(shared)); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
FSDPP_MODULE(TiedHead);

struct TiedImpl : torch::nn::Module {
  TiedImpl(int64_t vocab, int64_t dim) {
    embed = register_module("embed", torch::nn::Embedding(vocab, dim));
    block = register_module("block", TinyBlock(dim));
    head = register_module("head", TiedHead(embed->weight));
  }
  at::Tensor forward(const at::Tensor& ids) { return head(block(embed(ids))); }
  Hooked<torch::nn::Embedding> embed{nullptr};
  TinyBlock block{nullptr};
  TiedHead head{nullptr};
};
FSDPP_MODULE(Tied);

Trainee token_trainee(Tied net) {
  return {net.ptr(), [net](const at::Tensor& ids, int) mutable { return token_loss(net(ids), ids.flip(0)); }};
}

struct NormStackImpl : torch::nn::Module {
  explicit NormStackImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    for (int64_t multiplier : {3, 4, 3})
      mlps.push_back(register_module("mlp" + std::to_string(mlps.size()), Mlp(dim, multiplier * dim)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm(x);
    for (auto& m : mlps) y = m(y);
    return y;
  }
  Hooked<torch::nn::LayerNorm> norm{nullptr};
  std::vector<Mlp> mlps;
};
FSDPP_MODULE(NormStack);

}  // namespace

void multi_forward_module(const Rank& world, Reshard reshard) {
  auto sharded = filled(MultiForward(), *world), plain = filled(MultiForward(), *world);
  auto mesh = mesh_of(world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  auto inner = fully_shard(sharded->inner, mesh, options);
  fully_shard(sharded, mesh, options);
  ParityOptions parity;
  parity.after_step = [&] {
    EXPECT_EQ(inner.stats().reduces, 1) << "both uses are reduced together";
    inner.reset_stats();
  };
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {8, 4}), parity);
}

void explicit_prefetching(const Rank& world) {
  constexpr int kBlocks = 8, kAhead = 2;
  auto sharded = tiny_net(*world, kBlocks), plain = tiny_net(*world, kBlocks);
  shard_tiny_net(sharded, mesh_of(world));
  auto block = [&](int i) { return unit_of(*sharded->blocks[static_cast<size_t>(i)]); };
  for (int i = 0; i + kAhead < kBlocks; ++i) block(i).set_modules_to_forward_prefetch({block(i + 1), block(i + 2)});
  for (int i = kAhead; i < kBlocks; ++i) block(i).set_modules_to_backward_prefetch({block(i - 1), block(i - 2)});
  expect_train_parity(*world, token_trainee(sharded), token_trainee(plain), token_inputs(*world));
}

void post_optim_event(const Rank& world) {
  auto sharded = tiny_net(*world), plain = tiny_net(*world);
  shard_tiny_net(sharded, mesh_of(world));
  ParityOptions parity;
  int left = parity.iterations;
  parity.after_step = [&] {
    if (--left == 0) return;  // nobody would wait for that event
    auto stream = cuda::current_stream(world->device());
    cuda::Event event;
    event.record(stream);
    unit_of(*sharded).set_post_optim_event(std::move(event));
    stream.sleep(2);  // the host runs ahead into the next forward
  };
  expect_train_parity(*world, token_trainee(sharded), token_trainee(plain), token_inputs(*world), parity);
}

void train_parity_with_shared_params(const Rank& world, Reshard reshard, Tying tying) {
  auto sharded = filled(Tied(23, 6), *world), plain = filled(Tied(23, 6), *world);
  auto mesh = mesh_of(world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  fully_shard(sharded->block, mesh, options);
  if (tying == Tying::InOneUnit) fully_shard({sharded->embed.ptr(), sharded->head.ptr()}, mesh, options);
  if (tying == Tying::InTwoUnits) fully_shard(sharded->embed, mesh, options), fully_shard(sharded->head, mesh, options);
  fully_shard(sharded, mesh, options);
  expect_train_parity(*world, token_trainee(sharded), token_trainee(plain), token_inputs(*world));
}

// A vocabulary that no rank count divides: every row of the shared weight learns, those at the end of the last rank's part too.
void train_shared_params_uneven_shard(const Rank& world, Reshard reshard) {
  int64_t vocab = world->size() * 4 + 1;
  auto sharded = filled(Tied(vocab, 6), *world), plain = filled(Tied(vocab, 6), *world);
  auto mesh = mesh_of(world);
  FullyShardOptions options{.reshard_after_forward = reshard};
  auto unit = fully_shard({sharded->embed.ptr(), sharded->head.ptr()}, mesh, options);
  fully_shard(sharded, mesh, options);
  auto before = full_tensor(sharded->embed->weight);
  auto inputs = [&](int i, int rank) { return tokens(100 * i + rank, vocab).to(world->device()); };
  expect_train_parity(*world, token_trainee(sharded), token_trainee(plain), inputs);
  unit.unshard();
  auto after = sharded->embed->weight.detach().clone();
  unit.reshard();
  for (int64_t row = 0; row < vocab; ++row) EXPECT_FALSE(at::equal(before[row], after[row])) << "row " << row;
}

void train_parity_hsdp(const Rank& world, int replicas, int64_t dim, Reshard reshard, bool sync_at_last_only) {
  auto sharded = filled_float64(NormStack(dim), *world), plain = filled_float64(NormStack(dim), *world);
  auto mesh = mesh_of(world, replicas);
  FullyShardOptions options{.reshard_after_forward = reshard};
  fully_shard(sharded->norm, mesh, options);
  for (auto& m : sharded->mlps) fully_shard(m, mesh, options);
  fully_shard(sharded, mesh, options);
  auto parity = float64_parity();
  parity.iterations = 5;
  parity.micro_batches = 3;
  if (sync_at_last_only) parity.before_micro_batch = [&](int k) { unit_of(*sharded).set_requires_gradient_sync(k == 2); };
  parity.after_backwards = [&] { expect_same_parameters(*sharded, *plain, 1e-12, 1e-12); };
  expect_train_parity(*world, trainee(sharded), trainee(plain), random_inputs(world, {8, dim}, at::kDouble), parity);
}

}  // namespace fsdpp::test::suite
